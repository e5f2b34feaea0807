"""Conversations token by token: what is the policy's, what each turn earned, what tools answer."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Tokenizer

from environments.api import wire
from environments.api.groups import read
from environments.conversation import Conversation
from environments.demo_model.model import build_tokenizer
from environments.multi_turn import MultiTurnConfig, MultiTurnEnv
from environments.peers.inference import Completion
from environments.tool_calls import FORMS, ToolCall, ToolFormat, tool_calls, tool_format
from environments.trajectory import Message, Trajectory, TurnReward, scored_group, turn_advantages
from tests.stand_ins import Scripted, scripted

CHATML = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    # as Qwen3's does: thinking is left out of all turns but the last
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    made = build_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    made.eos_token = END
    made.chat_template = CHATML
    return made


def completion(tokenizer: Qwen2Tokenizer, prompt: list[int], text: str, version: int = 1) -> Completion:
    ids = tokenizer.encode(text)
    return Completion(prompt, ids, [-0.5] * len(ids), text, "stop" if text.endswith(END) else "length", version)


def talk(tokenizer: Qwen2Tokenizer, *turns: str, versions: tuple[int, ...] = (1, 2, 3)) -> Conversation:
    """Turns of the policy, and between them a user who says yes."""
    made = Conversation(tokenizer, [{"role": "user", "content": "Hi"}])
    for number, text in enumerate(turns):
        if number:
            made.hear([{"role": "user", "content": "yes"}])
        made.say(completion(tokenizer, made.tokens, text, versions[number]), text.removesuffix(END))
    return made


def test_conversation_tokens_and_version(tokenizer: Qwen2Tokenizer) -> None:
    made = talk(tokenizer, "one" + END, "two" + END)
    assert made.rollout_logprobs == [-0.5 if trained else 1.0 for trained in made.trained]
    thought = talk(tokenizer, "<think>hm</think>one" + END, "two" + END)
    assert "<think>hm</think>one" in tokenizer.decode(thought.tokens)
    assert "<think>" not in tokenizer.apply_chat_template(thought.messages, tokenize=False)  # would be other tokens

    assert talk(tokenizer, "a" + END, "b" + END, versions=(5, 4)).trajectory(1.0).policy_version == 4
    made = talk(tokenizer, "a" + END)
    made.hear([{"role": "user", "content": "yes"}])
    made.say(Completion(made.tokens, [9], [-1.0], "x", "stop", None), "x")
    assert made.trajectory(1.0).policy_version is None
    with pytest.raises(ValueError, match="prompt_token_ids"):
        made.say(completion(tokenizer, [1, 2], "x"), "x")


def trajectory(score: float, *turn_rewards: TurnReward) -> Trajectory:
    """Six tokens: a prompt, two of the first turn, one heard, two of the second turn."""
    trained = [False, True, True, False, True, True]
    return Trajectory([0] * 6, trained, [1.0] * 6, score, 1, [], turn_rewards=turn_rewards)


def test_turn_advantages_by_hand() -> None:
    one = trajectory(1.0, TurnReward(3, 1.0))  # the first turn earned 1, the end nothing
    two = trajectory(3.0, TurnReward(3, 0.0))  # the end earned 3
    # all rewards: 1, 0, 0, 3: mean 1, variance (0 + 1 + 1 + 4) / 4 = 3/2
    nought, three = ((value - 1.0) / 1.5**0.5 for value in (0.0, 3.0))
    advantages = turn_advantages([one, two])
    assert advantages is not None
    assert advantages[0] == pytest.approx([0, nought, nought, 0, nought, nought])
    assert advantages[1] == pytest.approx([0, nought + three, nought + three, 0, three, three])

    # As in the guessing game of docs/environments.md: one guess costs 0.1, then it is right; the others give up.
    found, gave_up = trajectory(0.9, TurnReward(3, -0.1)), trajectory(0.0)
    advantages = turn_advantages([found, gave_up, gave_up])
    assert advantages is not None
    assert advantages[0][1] > 0.0 > advantages[1][1] == advantages[2][1]
    assert sum(each[1] for each in advantages) == pytest.approx(0.0)

    advantages = turn_advantages([trajectory(value, TurnReward(3, value)) for value in (1.0, 0.0)])
    assert advantages == [pytest.approx([0, 1, 1, 0, 0, 0]), pytest.approx([0, -1, -1, 0, 0, 0])]
    silent = turn_advantages([trajectory(-0.1, TurnReward(3, -0.1)), trajectory(0.0)])  # one turn cost, no end earned
    assert silent is not None and silent[0][1] < 0.0 < silent[1][1]
    lost = Trajectory([0] * 3, [False] * 3, [1.0] * 3, None, 1, [])
    pair = [trajectory(1.0, TurnReward(3, 1.0)), trajectory(0.0, TurnReward(3, 0.0))]
    assert turn_advantages([*pair, lost]) == [*(turn_advantages(pair) or ()), [0.0] * 3]
    assert turn_advantages([trajectory(1.0), trajectory(0.0)]) is None  # the trainer makes them
    assert turn_advantages([trajectory(1.0, TurnReward(3, 1.0))] * 2) == [[0.0] * 6] * 2


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


class Sums(MultiTurnEnv[int]):
    """The policy is to find a sum with a tool."""

    name = "sums"

    async def get_next_item(self) -> int:
        return 5

    def opening(self, item: int) -> list[Message]:
        return [{"role": "user", "content": "2+3?"}]

    def tools(self) -> list[Callable[..., Any]]:
        return [add]

    async def score_conversation(self, item: int, talk: Conversation) -> float:
        return float(str(item) in talk.messages[-1]["content"])

    async def evaluate(self) -> dict[str, float]:
        return {}


def sums(tokenizer: Qwen2Tokenizer, turns: list[str], **changes: Any) -> tuple[Sums, list[str]]:
    """The environment before a policy that says these in turn, and the prompts that it saw."""
    prompts: list[str] = []

    def say(prompt: list[int]) -> list[str]:
        prompts.append(str(tokenizer.decode(prompt)))
        return [turns[prompts[-1].count("<|im_start|>assistant") - 1]]

    config = MultiTurnConfig(**({"tokenizer_name": "demo", "group_size": 1, "max_token_length": 4096} | changes))
    return Sums(config, Scripted(tokenizer, say), tokenizer), prompts


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>' + END


def test_multi_turn_the_policy_hears_what_its_tools_gave(tokenizer: Qwen2Tokenizer) -> None:
    env, prompts = sums(tokenizer, [CALL, "It is 5." + END])
    group = asyncio.run(env.collect_trajectories(5))
    assert group is not None and group.scores == [1.0] and group.policy_versions == [4]
    assert '"name": "add"' in prompts[0].partition("<|im_start|>")[0]  # the schema, by the template
    assert prompts[1].endswith("<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n")
    assert group.messages is not None and [message["role"] for message in group.messages[0]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    sampled = [token for token in group.masks[0] if token != -100]
    assert tokenizer.decode(sampled) == CALL + "It is 5." + END
    assert env.measures.take() == {"turns": 2.0, "failed": 0.0}


def test_multi_turn_template_without_tools(tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    deaf = copy.deepcopy(tokenizer)
    deaf.chat_template = CHATML[CHATML.index("{% for m") :]
    env, _ = sums(deaf, [CALL, "It is 5." + END])
    for _ in range(2):
        asyncio.run(env.collect_trajectories(5))
    (warned,) = [record for record in caplog.records if record.name == "environments.multi_turn"]
    assert warned.levelno == logging.WARNING and "add" in warned.getMessage()
    caplog.clear()
    env, _ = sums(tokenizer, [CALL, "It is 5." + END])
    asyncio.run(env.collect_trajectories(5))
    assert not caplog.records


def test_multi_turn_turns_and_room_are_bounded(tokenizer: Qwen2Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    env, prompts = sums(tokenizer, [CALL] * 9, max_turns=3)
    asyncio.run(env.collect_trajectories(5))
    assert len(prompts) == 3
    env, prompts = sums(tokenizer, [CALL] * 9)
    asyncio.run(env.collect_trajectories(5))
    second = len(tokenizer.encode(prompts[1]))
    for longest in (second - 3, second):  # the tool's answer leaves no room
        env, prompts = sums(tokenizer, [CALL] * 9, max_token_length=longest)
        group = asyncio.run(env.collect_trajectories(5))
        assert group is not None and len(prompts) == 1
        assert group.tokens[0] == tokenizer.encode(prompts[0] + CALL)
        assert group.messages is not None and group.messages[0][-1]["role"] == "assistant"  # not the tool
    made = talk(tokenizer, "a" + END)
    monkeypatch.setattr(tokenizer, "encode", None)  # not called: no token has more than 13 characters
    assert not made.hear([{"role": "tool", "content": "x" * 13_000}], 1000) and made.truncated


def test_conversation_groups_are_sound_on_the_wire(tokenizer: Qwen2Tokenizer) -> None:
    made = talk(tokenizer, "one" + END, "two" + END)
    half: Any = np.float32(0.5)  # rewards are any kind of number
    made.reward(half)
    group = scored_group([made.trajectory(1.0), talk(tokenizer, "a" + END).trajectory(0.0)])
    assert wire.unpack(read(wire.encode(group), wire.JSON).group).masks == group.masks


class Shaky(MultiTurnEnv[int]):
    """Some of its conversations raise an error, by the number of the call."""

    name = "shaky"
    fails: Callable[[int], BaseException | None] = staticmethod(lambda call: None)
    calls = 0

    def opening(self, item: int) -> list[Message]:
        return [{"role": "user", "content": "Hi"}]

    async def respond(self, item: int, talk: Conversation) -> None:
        self.calls += 1
        if error := self.fails(self.calls):
            raise error

    async def score_conversation(self, item: int, talk: Conversation) -> float:
        return float(self.calls)


def shaky(tokenizer: Qwen2Tokenizer, fails: Callable[[int], BaseException | None]) -> Shaky:
    made = scripted(Shaky, "a" + END, config=MultiTurnConfig, tokenizer=tokenizer, group_size=3)
    made.fails = fails
    return made


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1)])
def test_multi_turn_failure_is_tried_again(tokenizer: Qwen2Tokenizer, error: BaseException) -> None:
    env = shaky(tokenizer, lambda call: error if call == 2 else None)
    group = asyncio.run(env.scored(1))
    assert group is not None and not any((own or {}).get("unscored") for own in group.overrides or [])
    assert env.calls == 4 and env.measures.take()["failed"] == 0.0


def test_multi_turn_conversations_that_fail_twice(tokenizer: Qwen2Tokenizer) -> None:
    env = shaky(tokenizer, lambda call: ValueError("x") if call in (2, 3) else None)
    group = asyncio.run(env.scored(1))
    assert group is not None and len(group.tokens) == 3
    (lost,) = [place for place, own in enumerate(group.overrides or []) if own.get("unscored")]
    assert set(group.masks[lost]) == {wire.IGNORED} and group.policy_versions == [4, 4, 4]
    assert wire.counted_scores(group) == [score for place, score in enumerate(group.scores) if place != lost]
    assert env.measures.take()["failed"] == pytest.approx(1 / 3)
    read(wire.encode_group(group, wire.JSON), wire.JSON)  # the rollout API takes it

    env = shaky(tokenizer, lambda call: ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        asyncio.run(env.scored(1))
    assert env.calls == 6


# tool calls ----------------------------------------------------------------------------------------------------------


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
        (HERMES, "llama3_json", '{"name": "add", "parameters": {"a": 2, "b": 3}}', ["5"]),
        (HERMES, "auto", '{"name": "add", "parameters": {"a": 2, "b": 3}}', []),
        (HERMES, "auto", hermes('{"name": "add", "arguments": {"a": 2, "c": 3}}'), ["TypeError: add() got"]),
        (HERMES, "auto", hermes('{"name": "sub"}'), ["no such tool; known: ['add']"]),
        (HERMES, "auto", hermes('{"name": "add", "a": 2}'), ["not a tool call: "]),
    ],
)  # fmt: skip
def test_tool_calls_in_the_form_of_the_template(template: str, setting: Any, turn: str, heard: list[str]) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    env = scripted(Sums, config=MultiTurnConfig, tokenizer=tokenizer, tool_format=setting)
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
