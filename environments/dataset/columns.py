"""Prompt and right answer of a row: which columns they are, and what a column may hold."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from environments.config import ConfigError, UnusableRow
from environments.data_config import DataConfig
from environments.dataset.data import Data, Row, listed, shown
from environments.maths.answer_form import read_number
from environments.trajectory import Message
from grpo_common.suggest import nearest

PROMPT_COLUMNS: Final = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS: Final = ("answer", "solution", "label")

Prompt = str | list[Message]


@dataclass(frozen=True)
class Columns:
    """Which columns are used.

    Attributes:
        prompt: Column of the prompt; None if there is a template, or if a row is a task without a prompt.
        template: Text with columns in braces; None if there is a column.
        answer: Column of the right answer; None: no column is.
        as_messages: Prompts are messages in the data set.
    """

    prompt: str | None
    template: str | None
    answer: str | None
    as_messages: bool

    @classmethod
    def of(cls, config: DataConfig, data: Data, *, prompts: bool = True) -> Columns:
        """Return the columns that the settings name, or the first ones that exist of the usual names.

        Args:
            prompts: False: a row is a task, and needs no prompt.

        Raises:
            ConfigError: There is no such column.
        """
        there = data.rows.columns
        answer = _chosen("--data.answer_column", config.answer_column, ANSWER_COLUMNS, there)
        if not prompts:
            return cls(None, None, answer, as_messages=False)
        if (template := config.prompt_template) is not None:
            for name in _names_in(template):
                _chosen("--data.prompt_template", name, (), there)
            return cls(None, template, answer, as_messages=False)
        prompt = _chosen("--data.prompt_column", config.prompt_column, PROMPT_COLUMNS, there)
        if prompt is None:
            raise ConfigError(
                field="--data.prompt_column",
                got=f"the columns {listed(there)} in {data.name}",
                wanted=f"one of {', '.join(PROMPT_COLUMNS)}",
                fix="name the column with the prompt, or write --data.prompt_template",
            )
        first = next((value for n in data.checked() if (value := data.rows[n][prompt]) is not None), None)
        return cls(prompt, None, answer, as_messages=isinstance(first, list))

    def prompt_of(self, row: Row) -> Prompt:
        """Return a row's prompt. An answer of the assistant at its end is left out.

        Raises:
            UnusableRow: The row has none, or one of another kind than the others; the field is the column.
        """
        if self.template is not None:
            for name in _names_in(self.template):
                if not isinstance(row[name], str | int | float):
                    raise UnusableRow(field=name, got=shown(row[name]), wanted="text or a number")
            return self.template.format_map(row)
        if self.prompt is None:
            return json.dumps(row, default=str)
        value = row[self.prompt]
        if self.as_messages:
            return _messages(self.prompt, value)
        if not isinstance(value, str) or not value.strip():
            raise UnusableRow(field=self.prompt, got=shown(value), wanted="text, as in the first row")
        return value

    def answer_of(self, row: Row) -> str | None:
        """Return a row's right answer as text; None if it has none, or an empty one.

        Of a solution whose last line is `#### X`, or ends in `#### 18`, a number, it is what stands after the hashes.

        Raises:
            UnusableRow: It is something else than text or a number.
        """
        if self.answer is None or (value := row[self.answer]) is None:
            return None
        if not isinstance(value, str | int | float):
            raise UnusableRow(field=self.answer, got=shown(value), wanted="text or a number")
        text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
        before, marker, after = text.rpartition("\n")[2].rpartition("####")
        if marker and (after := after.strip()):
            if (number := read_number(after)) is not None:
                return number.text
            if not before.strip():
                return after
        return text or None

    def __str__(self) -> str:
        """Return what the start prints."""
        source = f"the template {self.template!r}" if self.template is not None else f"column {self.prompt}"
        source = source if self.template or self.prompt else "written by the agent"
        return f"right answer: {f'column {self.answer}' if self.answer else 'no column'}; prompt: {source}"


def _names_in(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def _chosen(flag: str, named: str | None, usual: Sequence[str], there: Iterable[str]) -> str | None:
    there = list(there)
    if named is None:
        return next((name for name in usual if name in there), None)
    if named in there:
        return named
    near = nearest(named, there)
    fix = f"did you mean {listed([near])}?" if near else "name one of these"
    raise ConfigError("no such column", field=f"{flag} {named}", wanted=f"one of {listed(there)}", fix=fix)


class _Message(msgspec.Struct):
    role: str
    content: Any = None


def _messages(column: str, value: Any) -> list[Message]:
    """Return messages without keys that are None: a table has each key in all messages."""
    wanted = 'a list of messages, {"role": …, "content": …}, as in the first row'
    try:
        found = msgspec.convert(value, type=list[_Message])
    except msgspec.ValidationError as error:
        raise UnusableRow(field=column, got=f"{shown(value)}: {error}", wanted=wanted) from None
    if empty := [each.role for each in found if each.content is None and each.role != "assistant"]:
        raise UnusableRow(field=column, got=f"a message of {empty[0]} without content", wanted=wanted)
    messages = [{key: each for key, each in message.items() if each is not None} for message in value]
    if found and found[-1].role == "assistant":
        messages = messages[:-1]
    if not messages:
        raise UnusableRow(field=column, got="no message, or only an answer of the assistant", wanted=wanted)
    return messages
