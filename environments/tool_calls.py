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
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, get_args

import msgspec

from environments.tokenizers import THINK, THOUGHT

ToolFormat = Literal["hermes", "qwen3_coder", "llama3_json"]
OPENS: Final = "<tool_call>"
CLOSES: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
FUNCTION: Final = "<function="
SHOWN: Final = 200
"""Characters of a broken call in its error text."""
CALL_KEYS: Final = ("name", "arguments", "parameters", "type", "id")
"""Keys of a call in JSON. Some models add `"type": "function"` and an id."""

Schemas = Sequence[Mapping[str, Any]]
"""JSON schemas of the tools."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the policy wrote."""

    name: str
    arguments: dict[str, Any]


class BrokenCall(ValueError):
    """Text that begins as a call and is none. The message is for the policy."""


def tool_calls(text: str, form: ToolFormat = "hermes", schemas: Schemas = ()) -> list[ToolCall | str]:
    """Return the calls in a turn, in order. For a call that cannot be read, the list has an error text instead.

    Args:
        schemas: The types of arguments, which `qwen3_coder` writes without quotes.
    """
    parser = PARSERS[form](text, schemas)
    mark_or_call = re.compile(f"{THINK}|{THOUGHT}|{parser.begins}")
    found, place = parser.found, 0
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
            try:
                parser.read(mark.start())
            except BrokenCall as error:
                shown = text[mark.start() : mark.start() + SHOWN]
                found.append(f"not a tool call: {shown!r}: {error}; write {parser.example}")
            place = max(place, parser.place)
    return found


def tool_format(chat_template: object) -> ToolFormat:
    """Return the form of calls that a chat template asks for; `hermes` if it asks for none."""
    template = str(chat_template)
    if FUNCTION in template:
        return "qwen3_coder"
    llama = PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template)
    return "llama3_json" if llama and OPENS not in template else "hermes"


class Parser(ABC):
    """Reads the calls of one turn.

    Attributes:
        begins: Regular expression of the beginning of a call.
        example: What a right call looks like.
        place: Where the text is read next.
        found: The calls, and error texts.
    """

    begins: ClassVar[str]
    example: ClassVar[str]

    def __init__(self, text: str, schemas: Schemas) -> None:
        self.text, self.schemas, self.place = text, schemas, 0
        self.found: list[ToolCall | str] = []

    @abstractmethod
    def read(self, start: int) -> None:
        """Append the calls that begin at `start`, and move `place` behind them.

        Raises:
            BrokenCall: There is no call.
        """

    def value(self, start: int) -> Any:
        """Return the JSON value at `start`, and move `place` behind it. Marks inside its strings do not end it."""
        try:
            _, self.place = json.JSONDecoder().raw_decode(self.text, start)
            # json reads more than JSON: NaN, and halves of characters, which no tokenizer can encode.
            return msgspec.json.decode(self.text[start : self.place])
        except (ValueError, RecursionError) as error:
            raise BrokenCall(f"not JSON ({str(error).partition(':')[0]})") from None

    def skip(self, *marks: str) -> bool:
        """Move `place` behind white space, and behind the first of the marks that stands there."""
        at = self._after_space()
        mark = next((mark for mark in marks if self.text.startswith(mark, at)), None)
        self.place = at + len(mark or "")
        return mark is not None

    def at_end(self) -> bool:
        """Return whether only white space is left."""
        return self._after_space() == len(self.text)

    def _after_space(self) -> int:
        at = self.place
        while self.text[at : at + 1].isspace():
            at += 1
        return at


def _call(value: Any) -> ToolCall:
    """Return the call of a JSON value.

    Raises:
        BrokenCall: It is no call.
    """
    if not isinstance(value, dict):
        raise BrokenCall("not an object")
    unknown = [key for key in value if key not in CALL_KEYS]
    if unknown or value.get("type", "function") != "function":
        raise BrokenCall(f"unknown key {unknown[0]!r}" if unknown else f"unknown type {value['type']!r}")
    if not isinstance(name := value.get("name"), str):
        raise BrokenCall("no name, or one that is not text")
    if "arguments" in value and "parameters" in value:
        raise BrokenCall("arguments and parameters; give one of them")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON in a string, as in OpenAI's API
        try:
            arguments = msgspec.json.decode(arguments)
        except (ValueError, RecursionError):
            raise BrokenCall("arguments are text that is not JSON") from None
    if arguments is not None and not isinstance(arguments, dict):
        raise BrokenCall("arguments are not an object")
    return ToolCall(name, arguments or {})


class Hermes(Parser):
    """JSON between marks."""

    begins = OPENS
    example = f'{OPENS}{{"name": …, "arguments": {{…}}}}{CLOSES}'

    def read(self, start: int) -> None:
        self.place = start + len(OPENS)
        self.skip()
        call = _call(self.value(self.place))
        if not self.skip(CLOSES) and not self.at_end():
            raise BrokenCall(f"no {CLOSES} after the object")
        self.found.append(call)


class Qwen3Coder(Parser):
    """Tags; values are text, and JSON where the tool's schema does not say that they are text."""

    begins = rf"(?:{OPENS}\s*)?{FUNCTION}|{OPENS}"
    example = f"{OPENS}{FUNCTION}NAME><parameter=NAME>VALUE</parameter></function>{CLOSES}"
    HEAD = re.compile(rf"(?:{OPENS}\s*)?{FUNCTION}([^<>\n]+)>\s*")
    PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
    # A value may have </parameter> inside: it ends where the next parameter or the end of the call follows.
    VALUE_ENDS = re.compile(r"\n?</parameter>\s*(?=<parameter=|</function>)")
    has_ends = True

    def read(self, start: int) -> None:
        head = self.HEAD.match(self.text, start)
        if head is None:
            raise BrokenCall(f"no {FUNCTION}NAME>")
        name, arguments, self.place = head[1].strip(), {}, head.end()
        types = self._types(name)
        while parameter := self.PARAMETER.match(self.text, self.place):
            # Once there is no end, later values have none: the text is not searched for each of them.
            end = self.VALUE_ENDS.search(self.text, parameter.end()) if self.has_ends else None
            self.has_ends = end is not None
            key = parameter[1].strip()
            if end is None:
                raise BrokenCall(f"no </parameter> after the value of {key}")
            if key in arguments:
                raise BrokenCall(f"{key} twice")
            arguments[key] = _typed(self.text[parameter.end() : end.start()], types.get(key, {}))
            self.place = end.end()
        if not self.skip("</function>"):
            raise BrokenCall("no </function> at its end")
        self.skip(CLOSES)
        self.found.append(ToolCall(name, arguments))

    def _types(self, name: str) -> Mapping[str, Any]:
        functions = (schema.get("function", schema) for schema in self.schemas)
        own = next((function for function in functions if function.get("name") == name), {})
        return own.get("parameters", {}).get("properties", {})


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """Return an argument that was written as text.

    A value that is not of its type stays text: the tool's error says what is wrong.
    """
    python = {"True": True, "False": False, "None": None}
    if schema.get("type", "string") == "string":
        return None if schema.get("nullable") and value.strip() in ("None", "null") else value
    if value.strip() in python:
        return python[value.strip()]
    try:
        return msgspec.json.decode(value)
    except (ValueError, RecursionError):
        return value


class Llama3Json(Parser):
    """JSON at the beginning of the turn, or after a token; several calls have semicolons between them."""

    begins = rf"{re.escape(PYTHON_TAG)}|\A\s*\{{|(?<={THOUGHT})\s*\{{"
    example = '{"name": …, "parameters": {…}}'

    def read(self, start: int) -> None:
        self.place = start
        tagged = self.skip(PYTHON_TAG)
        self.skip()
        first, before = self.place, len(self.found)
        try:
            while len(self.found) == before or self.text.startswith("{", self.place):
                self.found.append(_call(self.value(self.place)))
                self.skip(";", PYTHON_TAG)
                self.skip()
        except BrokenCall:
            # An answer may be JSON, or a set in braces, without being a call.
            if tagged or len(self.found) > before or '"name"' in self.text[first:]:
                raise


PARSERS: Final[Mapping[ToolFormat, type[Parser]]] = {
    "hermes": Hermes,
    "qwen3_coder": Qwen3Coder,
    "llama3_json": Llama3Json,
}
assert set(PARSERS) == set(get_args(ToolFormat))
