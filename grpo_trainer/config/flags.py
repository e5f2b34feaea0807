"""The command line of commands whose options are a `Section`: their flags, and a help with few or all of them.

`--help` has the options that matter first, `--help-all` the others. Both are plain text instead of Typer's tables,
whose columns cut long names short. Typer parses what is no option of the section: `--config`, `--json`.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, get_args

from typer.core import TyperCommand

from environments.running.settings_check import common_option
from grpo_trainer.config.options import Option, Section, by_name, key_of, options_of
from grpo_trainer.errors import ConfigError
from grpo_trainer.suggestions import OF_ENVIRONMENT, OF_RUN

ALL = "--help-all"
GIVEN = "grpo_trainer.config.flags"
"""Name of the given options in a command's context."""
COLUMN, NARROWEST = 34, 60
"""Where the texts begin; and the fewest columns that are written."""


class Row(NamedTuple):
    """An option in the help."""

    names: tuple[str, ...]
    kind: str
    about: str
    topic: str


class OptionsCommand(TyperCommand):
    """A command that takes the options of a section. Make one with `taking`; `given` returns their values."""

    root: ClassVar[type[Section]]
    first: ClassVar[tuple[str, ...]] = ()
    """Flags in `--help`, `--env.KEY` of all environments among them; none: all."""
    unlisted: ClassVar[Collection[str]] = ()
    """Keys of options that no help shows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ALL in args:
            topic = args[args.index(ALL) + 1 :][:1]
            print(all_options(self._rows(ctx), "".join(word for word in topic if not word.startswith("-"))))
            ctx.exit()
        ctx.meta[GIVEN], rest = self._split(args)
        return super().parse_args(ctx, rest)

    def _split(self, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of the section's options by the name that was written, and all other words."""
        given: dict[str, Any] = {}
        known, rest, words = by_name(self.root), list[str](), [*words]
        while words:
            word = words.pop(0)
            if word == "--":
                return given, [*rest, word, *words]
            flag, equals, value = word.partition("=")
            name, negated = key_of(flag), key_of(flag).removeprefix("no_")
            option = known.get(name) if flag.startswith("--") else None
            if option is not None and not equals and not option.is_bool and not words:
                raise ConfigError(field=flag, got="nothing", wanted="a value after it")
            if option is not None:
                given[name] = value if equals else True if option.is_bool else words.pop(0)
            elif flag.startswith("--no-") and not equals and negated in known and known[negated].is_bool:
                given[negated] = False
            else:
                rest.append(self._as_ours(word))
        return given, rest

    def _as_ours(self, word: str) -> str:
        """Return a flag under our name where another program's was written."""
        flag, equals, value = word.partition("=")
        name, own = key_of(flag), {key_of(each) for param in self.params for each in param.opts}
        if not flag.startswith("--") or flag.removeprefix("--") in own:
            return word
        takes_environment = any(each.startswith("--env.") for each in self.first)
        if name not in own and takes_environment and name in OF_ENVIRONMENT:
            return f"--env.{OF_ENVIRONMENT[name]}{equals}{value}"
        name = OF_RUN[name] if OF_RUN.get(name) in own else name
        return f"--{name.replace('_', '-')}{equals}{value}" if name in own else word

    def format_help(self, ctx: Any, formatter: Any) -> None:
        usage = f"Usage: {ctx.command_path} {' '.join(self.collect_usage_pieces(ctx))}\n\n"
        about, rows = "\n".join(_wrapped(" ".join(str(self.help or "").split()), 0)), self._rows(ctx)
        shown = first_options(rows, self.first) if self.first else f"{all_options(rows)}\n"
        formatter.write(f"{usage}{about}\n\n{shown}")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        flags = [flag for row in self._rows(ctx) for flag in row.names if flag.startswith(incomplete)]
        return [SimpleNamespace(value=flag, type="plain", help=None) for flag in flags]

    def _rows(self, ctx: Any) -> list[Row]:
        rows: list[Row] = []
        for param in self.get_params(ctx):
            metavar, about = getattr(param, "metavar", None) or "", getattr(param, "help", None) or ""
            is_flag = param.param_type_name == "option"
            if not getattr(param, "hidden", False):
                names = (*param.opts,) if is_flag else (metavar or str(param.name),)
                rows.append(Row(names, metavar.strip() if is_flag else "", about, "Command"))
        options = [option for option in options_of(self.root) if option.key not in self.unlisted]
        return [*rows, *(Row(option.flags, _kind(option), option.help, option.panel) for option in options)]


def taking(root: type[Section], *first: str, hidden: Collection[str] = ()) -> type[OptionsCommand]:
    """Return the class of a command that takes the options of a section; `--help` shows those flags that come first."""
    return type("Command", (OptionsCommand,), {"root": root, "first": first, "unlisted": hidden})


def given(ctx: Any) -> dict[str, Any]:
    """Return the options that a command's user gave, by the names that were written."""
    return ctx.meta[GIVEN]


def first_options(rows: Sequence[Row], first: Sequence[str]) -> str:
    """Return what fits on one screen: the first options, and where the others are."""
    by_flag = {flag: row for row in rows for flag in row.names}
    lines: list[str] = []
    for flag in first:
        if flag.startswith("--env.") and (found := common_option(flag.removeprefix("--env."))) is not None:
            about, default = found
            text = f"{about[0].upper()}{about[1:]}." + ("" if default is None else f" (default: {default})")
            by_flag[flag] = Row((flag,), "FLOAT" if isinstance(default, float) else "INT", text, "")
        lines += _lines(by_flag[flag], brief=True) if flag in by_flag else []
    lines += ["", f"All {len(rows)} options: {ALL}; those of one topic: {ALL} TOPIC"]
    topics = ", ".join(dict.fromkeys(row.topic for row in rows))
    return "\n".join([*lines, *_wrapped(f"Topics: {topics}", 0), ""])


def all_options(rows: Sequence[Row], topic: str = "") -> str:
    """Return every option under its topic, or those of one topic; raise a `ConfigError` if no topic begins so."""
    topics = list(dict.fromkeys(row.topic for row in rows))
    chosen = [name for name in topics if name.lower().startswith(topic.lower())]
    if not chosen:
        raise ConfigError("unknown topic", field=ALL, got=topic, wanted=f"one of {', '.join(topics)}")
    lines: list[str] = []
    for name in chosen:
        lines += [f"\n{name}:", *(line for row in rows if row.topic == name for line in _lines(row))]
    return "\n".join(lines).lstrip("\n")


def _kind(option: Option) -> str:
    if option.choices:
        return "CHOICE"
    kinds = [
        kind for kind in (get_args(option.field.annotation) or (option.field.annotation,)) if kind is not type(None)
    ]
    return {int: "INT", float: "FLOAT", Path: "PATH", bool: ""}.get(kinds[0], "TEXT") if kinds else "TEXT"


def _lines(row: Row, *, brief: bool = False) -> Iterator[str]:
    """An option's lines: names are whole, however long, and each value that is explained has a line.

    Brief: the first sentence and the default.
    """
    name = f"  {', '.join(row.names)} {row.kind}".rstrip()
    about, *values = row.about.split("\n\n")
    if brief:
        sentence, stop, rest = about.partition(". ")
        if " | " in sentence and stop:  # the choices
            more, _, rest = rest.partition(". ")
            sentence = f"{sentence}. {more}"
        default = about[about.rindex(" (") :] if about.endswith(")") and rest else ""
        about = f"{sentence.rstrip('.')}.{default}"
    text = _wrapped(about, COLUMN)
    text += [line for value in values for line in _wrapped(value, COLUMN + 2)]
    if len(name) < COLUMN - 1 and text:
        text[0] = name.ljust(COLUMN) + text[0][COLUMN:]
    else:
        yield name
    yield from text


def _wrapped(text: str, indent: int) -> list[str]:
    width = max(NARROWEST, shutil.get_terminal_size((100, 24)).columns)
    room = " " * indent
    return textwrap.wrap(text, width, initial_indent=room, subsequent_indent=room, break_on_hyphens=False)
