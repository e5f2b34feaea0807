"""Tool calls in the policy's turns. Families of models write them in different forms:

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>          Hermes, Qwen2.5, Qwen3
    qwen3_coder   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>   Qwen3-Coder, Qwen3.5
    llama3_json   {"name": "add", "parameters": {"a": 1}}, also after <|python_tag|>     Llama 3.1 to 3.3

A turn may have several calls, and text around them; in `llama3_json` the turn begins with the call. A call inside
thinking (`<think>…</think>`, finished or not) does not count. What begins as a call and is none is answered with an
error text, so that the policy can learn the form.

The forms are those of the models' chat templates. The names are those of vLLM's `--tool-call-parser`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from environments.tokenizers import THINK, THOUGHT

ToolFormat = Literal["hermes", "qwen3_coder", "llama3_json"]
OPENS: Final = "<tool_call>"
CLOSES: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
FUNCTION: Final = "<function="
SHOWN: Final = 200
"""Characters of a broken call in its error text."""
CODER_HEAD: Final = re.compile(rf"(?:{OPENS}\s*)?{FUNCTION}([^<>\n]+)>\s*")
CODER_PARAMETER: Final = re.compile(r"<parameter=([^<>\n]+)>\n?")
# A value may have </parameter> inside: it ends where the next parameter or the end of the call follows.
CODER_VALUE_ENDS: Final = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")

Schemas = Sequence[Mapping[str, Any]]
"""JSON schemas of the tools."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the policy wrote."""

    name: str
    arguments: dict[str, Any]


class _JsonCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call in JSON. Some models add `"type": "function"` and an id."""

    name: str
    arguments: dict[str, Any] | str | msgspec.UnsetType | None = msgspec.UNSET
    parameters: dict[str, Any] | str | msgspec.UnsetType | None = msgspec.UNSET
    type: Literal["function"] = "function"
    id: Any = None


class BrokenCall(ValueError):
    """Text that begins as a call and is none. The message is for the policy."""


def tool_calls(text: str, form: ToolFormat = "hermes", schemas: Schemas = ()) -> list[ToolCall | str]:
    """Return the calls in a turn, in order. For a call that cannot be read, the list has an error text instead.

    `schemas` have the types of arguments, which `qwen3_coder` writes without quotes.
    """
    how, cursor, found = FORMS[form], Cursor(text), list[ToolCall | str]()
    mark_or_call = re.compile(f"{THINK}|{THOUGHT}|{how.begins}")
    place = 0
    while mark := mark_or_call.search(text, place):
        place = mark.end()
        if mark[0] == THINK:
            end = text.find(THOUGHT, place)
            if end < 0:
                break
            place = end + len(THOUGHT)
        elif mark[0] == THOUGHT:  # the prompt, or nothing, opened this thinking
            found.clear()
        else:
            cursor.place = mark.start()
            try:
                found.extend(how.read(cursor, schemas))
            except BrokenCall as error:
                shown = text[mark.start() : mark.start() + SHOWN]
                found.append(f"not a tool call: {shown!r}: {error}; write {how.example}")
            place = max(place, cursor.place)
    return found


def tool_format(chat_template: object) -> ToolFormat:
    """Return the form of calls that a chat template asks for; `hermes` if it asks for none."""
    template = str(chat_template)
    if FUNCTION in template:
        return "qwen3_coder"
    llama = PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template)
    return "llama3_json" if llama and OPENS not in template else "hermes"


@dataclass
class Cursor:
    """A turn, and the place from which it is read next."""

    text: str
    place: int = 0
    has_ends: bool = True
    """Whether values of `qwen3_coder` may still have an end. If not, the text is not searched for each of them."""

    def call(self) -> ToolCall:
        """Return the call in JSON that begins here, and move behind it; or raise BrokenCall. Marks in its strings do
        not end it."""
        start = self.place
        try:
            _, self.place = json.JSONDecoder().raw_decode(self.text, start)
            # json reads more than JSON: NaN, and halves of characters, which no tokenizer can encode.
            call = msgspec.json.decode(self.text[start : self.place], type=_JsonCall)
            arguments = call.parameters if call.arguments is msgspec.UNSET else call.arguments
            if isinstance(arguments, str):  # JSON in a string, as in OpenAI's API
                arguments = msgspec.json.decode(arguments, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            raise BrokenCall(f"not a call ({error})") from None
        if msgspec.UNSET not in (call.arguments, call.parameters):
            raise BrokenCall("arguments and parameters; give one of them")
        return ToolCall(call.name, arguments or {})

    def skip(self, *marks: str) -> bool:
        """Move behind white space, and behind the first of the marks that stands there."""
        while self.text[self.place : self.place + 1].isspace():
            self.place += 1
        mark = next((mark for mark in marks if self.text.startswith(mark, self.place)), None)
        self.place += len(mark or "")
        return mark is not None


def _hermes(cursor: Cursor, _: Schemas) -> Iterator[ToolCall]:
    """Read JSON between marks."""
    cursor.skip(OPENS)
    cursor.skip()
    call = cursor.call()
    if not cursor.skip(CLOSES) and cursor.place < len(cursor.text):
        raise BrokenCall(f"no {CLOSES} after the object")
    yield call


def _qwen3_coder(cursor: Cursor, schemas: Schemas) -> Iterator[ToolCall]:
    """Read tags; values are text, and JSON where the tool's schema does not say that they are text."""
    text, arguments = cursor.text, dict[str, Any]()
    head = CODER_HEAD.match(text, cursor.place)
    if head is None:
        raise BrokenCall(f"no {FUNCTION}NAME>")
    name, cursor.place = head[1].strip(), head.end()
    functions = (schema.get("function", schema) for schema in schemas)
    own = next((function for function in functions if function.get("name") == name), {})
    types = own.get("parameters", {}).get("properties", {})
    while parameter := CODER_PARAMETER.match(text, cursor.place):
        end = CODER_VALUE_ENDS.search(text, parameter.end()) if cursor.has_ends else None
        cursor.has_ends = end is not None
        key = parameter[1].strip()
        if end is None:
            raise BrokenCall(f"no </parameter> after the value of {key}")
        if key in arguments:
            raise BrokenCall(f"{key} twice")
        arguments[key] = _typed(text[parameter.end() : end.start()], types.get(key, {}))
        cursor.place = end.end()
    if not cursor.skip("</function>"):
        raise BrokenCall("no </function> at its end")
    cursor.skip(CLOSES)
    yield ToolCall(name, arguments)


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """Return an argument that was written as text.

    A value that is not of its type stays text: the tool's error says what is wrong.
    """
    word, python = value.strip(), {"True": True, "False": False, "None": None}
    if schema.get("type", "string") == "string":
        return None if schema.get("nullable") and word in ("None", "null") else value
    if word in python:
        return python[word]
    try:
        return msgspec.json.decode(value)
    except (ValueError, RecursionError):
        return value


def _llama3_json(cursor: Cursor, _: Schemas) -> Iterator[ToolCall]:
    """Read JSON at the beginning of the turn, or after a token; several calls have semicolons between them."""
    tagged = cursor.skip(PYTHON_TAG)
    cursor.skip()
    first, count = cursor.place, 0
    try:
        while not count or cursor.text.startswith("{", cursor.place):
            yield cursor.call()
            count += 1
            cursor.skip(";", PYTHON_TAG)
            cursor.skip()
    except BrokenCall:
        # An answer may be JSON, or a set in braces, without being a call.
        if tagged or count or '"name"' in cursor.text[first:]:
            raise


@dataclass(frozen=True)
class Form:
    """A form of calls: the regular expression of its beginning, a right call, and what reads one at the cursor."""

    begins: str
    example: str
    read: Callable[[Cursor, Schemas], Iterator[ToolCall]]


FORMS: Final[Mapping[ToolFormat, Form]] = {
    "hermes": Form(OPENS, f'{OPENS}{{"name": …, "arguments": {{…}}}}{CLOSES}', _hermes),
    "qwen3_coder": Form(
        rf"(?:{OPENS}\s*)?{FUNCTION}|{OPENS}",
        f"{OPENS}{FUNCTION}NAME><parameter=NAME>VALUE</parameter></function>{CLOSES}",
        _qwen3_coder,
    ),
    "llama3_json": Form(
        rf"{re.escape(PYTHON_TAG)}|\A\s*\{{|(?<={THOUGHT})\s*\{{", '{"name": …, "parameters": {…}}', _llama3_json
    ),
}
