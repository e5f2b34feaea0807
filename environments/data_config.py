"""The tables ``[data]`` and ``[[rewards]]``: where rows come from, and which functions score the answers.

On the command line ``--data FILE`` is ``--data.path FILE``, and each ``--reward TEXT`` is one entry of ``[[rewards]]``:

    my.py:length            a function of a file
    my_package.rewards:f    a function of a module
    exact_match, math       a built-in
    regex:PATTERN           a built-in: 1 if the pattern is found. Everything after the first colon is the pattern
    my.py:length=0.1        with a weight
    regex=0.1:PATTERN       with a weight, which stands before the colon, since the pattern may contain `=`
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from grpo_common.errors import UserError

REGEX: Final = "regex:"
BUILT_IN_REWARDS: Final = ("exact_match", "math", "regex:PATTERN")
FORMS: Final = f"FILE.py:FUNCTION, MODULE:FUNCTION, or a built-in: {', '.join(BUILT_IN_REWARDS)}"
_LATEX: Final = (
    "nabla|natural|ncong|ne|nearrow|neg|neq|nexists|ngeq|ngtr|ni|nleq|nless|nmid|nolimits|nonumber|not|notin|nparallel|"
    "nprec|nsim|nsubseteq|nsucc|nsupseteq|nu|nwarrow"
)
_NEW_LINE: Final = re.compile(rf"(?<!\\)\\(?!(?:{_LATEX})(?![A-Za-z]))n")
"""A typed new line. The commands of LaTeX that begin with an n, such as ``\\neq``, are none, nor is ``\\\\n``."""


class TableError(UserError, ValueError):
    """An entry of `[data]` or `[[rewards]]` is wrong."""


class DataConfig(BaseModel):
    """The data set (``--data.…``, table ``[data]``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = Field(
        default=None,
        description="JSONL, JSON, CSV, TSV or Parquet file, a folder of these, or a data set's name on the hub; "
        "--data is the same",
    )
    split: str | None = Field(default=None, description="split to train on; unset: train, or the only one")
    subset: str | None = Field(default=None, description="subset (configuration) of a data set on the hub")
    prompt_column: str | None = Field(
        default=None,
        description="column with the prompt, text or messages; unset: prompt, question, problem or messages, the "
        "first that exists",
    )
    prompt_template: str | None = Field(
        default=None,
        description=r"text with columns in braces instead of one column, such as '{question}\nAnswer:'; \n is a new "
        r"line, except in commands of LaTeX such as \neq",
    )
    answer_column: str | None = Field(
        default=None,
        description="column with the right answer, which the built-in rewards compare with; unset: answer, solution "
        "or label, the first that exists",
    )
    chat: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="whether a text prompt is sent as a user message through the model's chat template; auto: yes, if "
        "the model has a template and the prompts don't contain its special tokens already",
    )
    held_out: int = Field(default=0, ge=0, description="rows kept for evaluation, which are never trained on")
    held_out_split: str | None = Field(
        default=None, description="split, or file, of the evaluation rows, instead of held_out"
    )
    allow_changed: bool = Field(
        default=False, description="only warn if the data differ from those that the run began with"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        """Accept the short form, the path alone."""
        return {"path": value} if isinstance(value, str) else value

    @field_validator("prompt_template")
    @classmethod
    def _names_columns(cls, template: str | None) -> str | None:
        """Turn typed new lines into characters, and check the braces."""
        if template is None:
            return None
        text = _NEW_LINE.sub("\n", template)
        wanted = "column names in braces, such as '{question}\\nAnswer:'"
        try:
            fields = [field for field in string.Formatter().parse(text) if field[1] is not None]
        except ValueError as error:
            raise TableError(str(error), wanted=wanted, fix="write {{ and }} for braces in the text") from None
        if not fields:
            raise TableError("no column is named", got=repr(template), wanted=wanted)
        for _, name, form, conversion in fields:
            if not name or name.isdigit() or form or conversion or set(name) & set(".["):
                shown = f"{name or ''}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}"
                raise TableError(
                    "braces hold the name of a column and nothing else",
                    got=f"{{{shown}}}",
                    wanted=wanted,
                    fix="name a column, or write {{ and }} for braces in the text",
                )
        return text

    @model_validator(mode="after")
    def _go_together(self) -> DataConfig:
        if self.prompt_template is not None and self.prompt_column is not None:
            raise TableError(
                field="--data.prompt_template",
                got=f"--data.prompt_column {self.prompt_column}, too",
                wanted="one of them",
                fix="omit --data.prompt_column: the template names its columns",
            )
        if self.held_out and self.held_out_split is not None:
            raise TableError(
                field="--data.held_out", got="--data.held_out_split, too", wanted="one of them", fix="omit one"
            )
        if self.path is None and (given := self.model_fields_set - {"path", "allow_changed"}):
            raise TableError(field="--data", got=f"no data set, but {', '.join(sorted(given))}", wanted="a data set")
        return self


class RewardConfig(BaseModel):
    """A reward (``--reward …``, an entry of ``[[rewards]]``)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: str = Field(description=FORMS)
    weight: float = Field(default=1.0, allow_inf_nan=False, description="factor of its score in the sum of all rewards")
    name: str | None = Field(
        default=None, pattern=r"^[\w.-]+$", description="name of its metric, reward_NAME; unset: the function's name"
    )
    main_thread: bool = Field(
        default=False, description="call it in the main thread, for signals; it blocks the environment meanwhile"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        """Accept the short form, a text, and move a weight that is written in `function` to `weight`."""
        table = {"function": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(table.get("function"), str):
            return table
        function, weight = read_reward(table["function"])
        if weight is not None and "weight" in table and table["weight"] != weight:
            raise TableError(
                field=f"--reward {function}",
                got=f"the weights {weight:g} and {table['weight']}",
                wanted="one weight",
                fix="omit one",
            )
        return {**table, "function": function, **({} if weight is None else {"weight": weight})}

    @property
    def label(self) -> str:
        """The name of its metric, without `reward_`."""
        if self.name is not None:
            return self.name
        return "regex" if self.is_regex else self.function.rpartition(":")[2]

    @property
    def compares(self) -> bool:
        """Whether it is a built-in that compares answers with the right one."""
        return self.function in ("exact_match", "math")

    @property
    def is_regex(self) -> bool:
        return self.function.startswith(REGEX)


def read_reward(text: str) -> tuple[str, float | None]:
    """Return a reward's function and its weight, if the text has one; raise TableError for another form."""
    field = f"--reward {text}"
    if text.startswith((REGEX, "regex=")):
        head, colon, pattern = text.partition(":")
        if not colon or not pattern:
            raise TableError(field=field, got="no pattern", wanted="regex:PATTERN, or with a weight regex=0.1:PATTERN")
        try:
            re.compile(pattern)
        except re.error as error:
            raise TableError(
                f"not a regular expression: {error}", field=field, got=repr(pattern), wanted="Python's syntax"
            ) from None
        _, equals, weight = head.partition("=")
        return REGEX + pattern, _weight(field, weight) if equals else None
    where, colon, last = text.rpartition(":")
    function, equals, weight = last.partition("=")
    if not colon and function not in BUILT_IN_REWARDS:
        fix = f"name the function: {function}:FUNCTION" if function.endswith(".py") else ""
        raise TableError(field=field, got=repr(text), wanted=FORMS, fix=fix)
    if colon and not (where and function.isidentifier()):
        raise TableError(field=field, got=repr(text), wanted=FORMS)
    return where + colon + function, _weight(field, weight) if equals else None


def _weight(field: str, text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(weight := float(text)):
            return weight
    fix = "for example my.py:length=0.1"
    raise TableError(field=field, got=f"the weight {text!r}", wanted="a finite number after =", fix=fix)


def _named_apart(rewards: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
    for label, count in Counter(reward.label for reward in rewards).items():
        if count > 1:
            raise TableError(
                "each reward is a metric of its name",
                field="--reward",
                got=f"{count} rewards named {label}",
                wanted="different names",
                fix='set name = "…" for each in [[rewards]] of a --config file',
            )
    return rewards


Rewards = Annotated[tuple[RewardConfig, ...], AfterValidator(_named_apart)]
"""The rewards of a run, each with another name."""
