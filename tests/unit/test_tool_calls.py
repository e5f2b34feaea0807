"""Tool calls of each family of models: whole and broken, inside and outside thinking; the family of a template."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.conversation import Conversation
from environments.demo_model.model import build_tokenizer
from environments.multi_turn import MultiTurnConfig, MultiTurnEnv, Tool
from environments.tool_calls import FORMS, ToolCall, ToolFormat, tool_calls, tool_format
from environments.trajectory import Message
from tests.stand_ins import Scripted

TYPES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "yes": {"type": "boolean"},
    "parts": {"type": "array"},
    "more": {"type": "object"},
    "note": {"type": "string", "nullable": True},
    "either": {"type": ["integer", "string"]},
}
SCHEMAS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": TYPES}}}]

F = ToolCall("f", {"text": "a"})
H = '<tool_call>{"name": "f", "arguments": {"text": "a"}}</tool_call>'
X = "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>"
L = '{"name": "f", "parameters": {"text": "a"}}'
TAG = "<|python_tag|>"


def hermes(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def text(value: str) -> ToolCall:
    return ToolCall("f", {"text": value})


MARKS = "</tool_call> <tool_call> </function> </parameter> <think> </think> } {<|python_tag|>"
"""A string with these is one value; none of them ends the call, or begins another."""


def coder(*values: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values)
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


ERROR = "an error text"
Found = list[ToolCall | Literal["an error text"]]
CASES: list[tuple[ToolFormat, str, Found]] = [
    # Whole calls
    ("hermes", "no call", []),
    ("hermes", H, [F]),
    ("hermes", f"I look it up.\n{H}\nWait.", [F]),
    ("hermes", H + H, [F, F]),
    ("hermes", hermes('\n{"name": "f", "parameters": {"text": "a"}}\n'), [F]),
    ("hermes", hermes('{"name": "f", "arguments": "{\\"text\\": \\"a\\"}"}'), [F]),
    ("hermes", hermes('{"id": "1", "type": "function", "name": "f", "arguments": {"text": "a"}}'), [F]),
    ("hermes", hermes('{"name": "f"}'), [ToolCall("f", {})]),
    ("hermes", hermes('{"name": "f", "arguments": null}'), [ToolCall("f", {})]),
    ("hermes", H.removesuffix("</tool_call>") + "\n", [F]),
    ("hermes", H.replace('"a"', f'"{MARKS}"'), [text(MARKS)]),
    ("hermes", hermes('{"name": "f", "arguments": {"text": "\\u00e9\\n\\""}}'), [text('é\n"')]),
    ("qwen3_coder", "no call", []),
    ("qwen3_coder", X, [F]),
    ("qwen3_coder", f"I look it up.\n{X}\nWait.", [F]),
    ("qwen3_coder", X + X, [F, F]),
    ("qwen3_coder", X.replace("\n", ""), [F]),
    ("qwen3_coder", X.removesuffix("</tool_call>"), [F]),
    ("qwen3_coder", X.removeprefix("<tool_call>\n"), [F]),
    ("qwen3_coder", coder(), [ToolCall("f", {})]),
    ("qwen3_coder", coder(("text", "")), [text("")]),
    ("qwen3_coder", coder(("text", " two\n\nlines \n")), [text(" two\n\nlines \n")]),
    ("qwen3_coder", coder(("text", MARKS)), [text(MARKS)]),
    ("qwen3_coder", coder(("text", "5"), ("count", "5")), [ToolCall("f", {"text": "5", "count": 5})]),
    ("qwen3_coder", coder(("share", "0.5"), ("yes", "True")), [ToolCall("f", {"share": 0.5, "yes": True})]),
    ("qwen3_coder", coder(("yes", "false"), ("parts", "[1, 2]")), [ToolCall("f", {"yes": False, "parts": [1, 2]})]),
    ("qwen3_coder", coder(("more", '{"a": "}"}')), [ToolCall("f", {"more": {"a": "}"}})]),
    ("qwen3_coder", coder(("note", "null"), ("either", "five")), [ToolCall("f", {"note": None, "either": "five"})]),
    ("qwen3_coder", coder(("count", "many"), ("other", "7")), [ToolCall("f", {"count": "many", "other": "7"})]),
    ("llama3_json", "no call", []),
    ("llama3_json", L, [F]),
    ("llama3_json", f"\n{L}\n", [F]),
    ("llama3_json", TAG + L, [F]),
    ("llama3_json", f"I look it up. {TAG}{L}", [F]),
    ("llama3_json", L.replace("parameters", "arguments"), [F]),
    ("llama3_json", '{"type": "function", ' + L[1:], [F]),
    ("llama3_json", '{"name": "f", "parameters": "{\\"text\\": \\"a\\"}"}', [F]),
    ("llama3_json", f"{L}; {L}\n{L}{TAG}{L}", [F, F, F, F]),
    ("llama3_json", L.replace('"a"', f'"{MARKS}"'), [text(MARKS)]),
    # An answer that is no call
    ("llama3_json", '{"answer": 5}', []),
    ("llama3_json", "{1, 2}", []),
    ("llama3_json", f"The call would be {L}", []),
    # Thinking
    *(
        case
        for form, call in (("hermes", H), ("qwen3_coder", X), ("llama3_json", L), ("llama3_json", TAG + L))
        for case in [
            (form, f"<think>{call}</think>", []),
            (form, f"<think>{call}", []),
            (form, f"<think>\n{call}</think>\n{call}", [F]),
            (form, f"{call}</think>no", []),
            (form, f"{call}</think>\n\n{call}", [F]),
            (form, f"{call}<think>{call}", [F]),
            (form, f"<think>a</think><think>{call}</think>{call}", [F]),
        ]
    ),
    # Broken calls
    *(
        ("hermes", hermes(body), [ERROR])
        for body in (
            *("f(1)", "[1]", "", '{"arguments": {}}', '{"name": ["f"]}', '{"name": null}'),
            *('{"name": "f", "arguments": 3}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": "a"}'),
            *('{"name": "f", "arguments": {}, "parameters": {}}', '{"name": "f", "args": {"text": "a"}}'),
            *('{"name": "f", "type": "code"}', '{"name": "f", "arguments": {"text": "a"}', "{'name': 'f'}"),
            *('{"name": "f\\ud800"}', '{"name": "f", "arguments": {"text": "\\ud800"}}'),  # half a character: no UTF-8
            *('{"name": "f", "arguments": {"count": NaN}}', '{"name": "f", "arguments": {"text": ' + "[" * 100_000),
        )
    ),
    ("hermes", '<tool_call>{"name": "f", "argum', [ERROR]),
    ("hermes", hermes('{"name": "f"} and more'), [ERROR]),
    ("hermes", hermes("f(1)") + H, [ERROR, F]),
    ("hermes", X, [ERROR]),
    *(
        ("qwen3_coder", body, [ERROR])
        for body in (
            *(H, "<tool_call>f(1)</tool_call>", "<tool_call><function=f", "<function=>", X[:40], X[:50], X[:60]),
            coder(("text", "a"), ("text", "b")),
            X.replace("<parameter=text>", "<parameter>"),
            X.replace("</function>\n", ""),
        )
    ),
    ("qwen3_coder", "<tool_call>f(1)</tool_call>" + X, [ERROR, F]),
    *(
        ("llama3_json", body, [ERROR])
        for body in (
            *(L[:-1], L[:20], '{"name": "f", "args": {}}', '{"name": 5}'),
            *(TAG, TAG + "f.call(text=1)", TAG + '{"answer": 5}'),
        )
    ),
    ("llama3_json", f"{L}; {L[:-1]}", [F, ERROR]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "turn", "found"), CASES, ids=[f"{form}-{n}" for n, (form, _, _) in enumerate(CASES)])
def test_calls_of_a_turn(form: ToolFormat, turn: str, found: Found) -> None:
    read = tool_calls(turn, form, SCHEMAS)
    assert [each if isinstance(each, ToolCall) else ERROR for each in read] == found
    for each in read:
        assert isinstance(each, ToolCall) or (FORMS[form].example in each and len(each) < 600)


PARTS = st.sampled_from(["<think>", "</think>", H, X, L, TAG, "a", '{"', "\n", "</function>"])


@given(st.sampled_from(sorted(FORMS)), st.lists(PARTS))
def test_a_turn_of_any_parts_is_read(form: ToolFormat, parts: list[str]) -> None:
    read = tool_calls("".join(parts), form, SCHEMAS)
    assert all(each == F or isinstance(each, str) for each in read)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


class Sums(MultiTurnEnv[int]):
    """Has a tool."""

    def opening(self, item: int) -> list[Message]:
        return [{"role": "user", "content": "2+3?"}]

    def tools(self) -> list[Tool]:
        return [add]

    async def score_conversation(self, item: int, talk: Conversation) -> float:
        return 0.0


HERMES = "For each call: <tool_call>{{ tools | tojson }}</tool_call>"
CODER = "{{ tools | tojson }}<tool_call>\n<function=example>"
LLAMA = '<|start_header_id|>{"name": function name, "parameters": …}{{ tools | tojson }}'


@pytest.mark.parametrize(
    ("template", "form"),
    [
        *((HERMES, "hermes"), (CODER, "qwen3_coder"), (LLAMA, "llama3_json")),
        (f"{TAG}{{{{ tools | tojson }}}}", "llama3_json"),
        *(("{{ tools | tojson }}", "hermes"), (None, "hermes")),
    ],
)
def test_the_form_of_a_template(template: str | None, form: ToolFormat) -> None:
    assert tool_format(template) == form


@pytest.mark.parametrize(
    ("template", "setting", "turn", "heard"),
    [
        (HERMES, "auto", hermes('{"name": "add", "arguments": {"a": 2, "b": 3}}'), ["5"]),
        (CODER, "auto", "<function=add><parameter=a>2</parameter><parameter=b>3</parameter></function>", ["5"]),
        (LLAMA, "auto", '{"name": "add", "parameters": {"a": 2, "b": 3}}', ["5"]),
        (HERMES, "llama3_json", '{"name": "add", "parameters": {"a": 2, "b": 3}}', ["5"]),
        (HERMES, "auto", '{"name": "add", "parameters": {"a": 2, "b": 3}}', []),
        (HERMES, "auto", hermes('{"name": "add", "arguments": {"a": 2, "c": 3}}'), ["TypeError: add() got"]),
        (HERMES, "auto", hermes('{"name": "sub"}'), ["no such tool; known: ['add']"]),
        (HERMES, "auto", hermes('{"name": "add", "a": 2}'), ["not a tool call: "]),
    ],
)  # fmt: skip
def test_tools_are_called_in_the_form_of_the_template_or_the_setting(
    template: str, setting: Any, turn: str, heard: list[str]
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    config = MultiTurnConfig(tokenizer_name="demo", tool_format=setting)
    env = Sums(config, Scripted(tokenizer, lambda _: []), tokenizer)
    messages = asyncio.run(env.call_tools(turn))
    assert all(message["role"] == "tool" for message in messages)
    pairs = zip(messages, heard, strict=True)
    assert all(message["content"].startswith(beginning) for message, beginning in pairs)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", FORMS)
def test_broken_calls_are_read_in_time_that_grows_with_the_turn(form: ToolFormat) -> None:
    begun = "<function=a><parameter=x>"
    found = tool_calls(begun * 20_000, form)
    assert len(found) == (20_000 if form == "qwen3_coder" else 0)
    assert all(isinstance(each, str) for each in found)
    for part in ("<tool_call>", "<tool_call>{", "<tool_call> ", "<|python_tag|>", "<think>", "</think>", " "):
        tool_calls(part * (100_000 // len(part)), form)
