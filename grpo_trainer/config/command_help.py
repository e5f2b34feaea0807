"""Help of commands with more than a hundred options: `--help` has those that matter first, `--help-all` the others.

Plain text instead of Typer's tables, whose columns cut long names short.
"""

from __future__ import annotations

import copy
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand

from environments.running.settings_check import common_option
from grpo_trainer.config.options import first_name
from grpo_trainer.errors import ConfigError
from grpo_trainer.suggestions import OF_ENVIRONMENT, OF_RUN

ALL = "--help-all"
COLUMN, NARROWEST = 34, 60
"""Where the texts begin; and the fewest columns that are written."""


class ManyOptions(TyperCommand):
    """A command whose `--help` shows few of its options. Make one with `showing`."""

    first: ClassVar[tuple[str, ...]] = ()
    environment: ClassVar[bool] = False
    """Whether `--env.KEY` sets options of an environment."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ALL in args:
            topic = args[args.index(ALL) + 1 :][:1]
            typer.echo(all_options(self._shown(ctx), "".join(word for word in topic if not word.startswith("-"))))
            ctx.exit()
        return super().parse_args(ctx, [self._as_known(word) for word in args])

    def _as_known(self, word: str) -> str:
        """Return a flag as this command knows it: with dashes, and by our name where another program's was written."""
        flag, equals, value = word.partition("=")
        plain, flags = flag.removeprefix("--").replace("-", "_"), {name for each in self.params for name in each.opts}
        if not flag.startswith("--") or flag in flags:
            return word
        own = f"--{plain.replace('_', '-')}"
        if own not in flags and self.environment and plain in OF_ENVIRONMENT:
            own = f"--env.{OF_ENVIRONMENT[plain]}"
        elif own not in flags:
            own = f"--{OF_RUN[plain]}" if f"--{OF_RUN.get(plain)}" in flags else flag
        return f"{own}{equals}{value}"

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(first_options(ctx.command_path, str(self.help or ""), self._shown(ctx), self.first))

    def _shown(self, ctx: Any) -> list[Any]:
        return _joined([each for each in self.get_params(ctx) if not getattr(each, "hidden", False)])


def showing(*first: str) -> type[ManyOptions]:
    """Return the class of a command whose `--help` shows these flags, those of environments among them."""
    return type("Command", (ManyOptions,), {"first": first, "environment": any(map(_is_of_environment, first))})


def _is_of_environment(flag: str) -> bool:
    return flag.startswith("--env.")


def _joined(options: Sequence[Any]) -> list[Any]:
    """Return the options without those that are second names; they are listed with the first name."""
    joined = {option.opts[0]: copy.copy(option) for option in options}
    for flag, option in list(joined.items()):
        if (first := joined.get(first_name(option.help or ""))) is not None:
            first.opts = [*first.opts, flag]
            del joined[flag]
    return list(joined.values())


def first_options(command: str, about: str, options: Sequence[Any], first: Sequence[str]) -> str:
    """Return what fits on one screen: what the command does, its first options, and where the others are."""
    by_flag = {flag: option for option in options for flag in option.opts}
    by_flag |= {
        flag: of for flag in first if _is_of_environment(flag) and (of := _environment_option(flag)) is not None
    }
    lines = [f"Usage: {command} [OPTIONS]", "", *_wrapped(" ".join(about.split()), 0), ""]
    for flag in first:
        lines += _row(by_flag[flag], brief=True) if flag in by_flag else []
    lines += ["", f"All {len(options)} options: {ALL}; those of one topic: {ALL} TOPIC"]
    return "\n".join([*lines, *_wrapped(f"Topics: {', '.join(_topics(options))}", 0), ""])


@dataclass(frozen=True)
class _EnvironmentOption:
    """An option of all environments, as far as a row of the help needs it."""

    opts: tuple[str, ...]
    metavar: str
    help: str


def _environment_option(flag: str) -> _EnvironmentOption | None:
    found = common_option(flag.removeprefix("--env."))
    if found is None:
        return None
    about, default = found
    kind = "FLOAT" if isinstance(default, float) else "INT"
    text = f"{about[0].upper()}{about[1:]}." + ("" if default is None else f" (default: {default})")
    return _EnvironmentOption((flag,), kind, text)


def all_options(options: Sequence[Any], topic: str = "") -> str:
    """Return every option under its topic, or those of one topic.

    Raises:
        ConfigError: no topic begins so.
    """
    topics = _topics(options)
    wanted = {name: rows for name, rows in topics.items() if name.lower().startswith(topic.lower())}
    if not wanted:
        raise ConfigError("unknown topic", field=ALL, got=topic, wanted=f"one of {', '.join(topics)}")
    lines = [line for name, rows in wanted.items() for line in [f"\n{name}:", *(r for o in rows for r in _row(o))]]
    return "\n".join(lines).lstrip("\n")


def _topics(options: Sequence[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for option in options:
        found.setdefault(getattr(option, "rich_help_panel", None) or "Command", []).append(option)
    return found


def _row(option: Any, *, brief: bool = False) -> Iterator[str]:
    """An option's lines: names are whole, however long, and each value that is explained has a line.

    Brief: the first sentence and the default.
    """
    name = f"  {', '.join(option.opts)} {(option.metavar or '').strip()}".rstrip()
    about, *values = str(option.help or "").split("\n\n")
    text = _wrapped(_in_brief(about) if brief else about, COLUMN)
    text += [line for value in values for line in _wrapped(value, COLUMN + 2)]
    if len(name) < COLUMN - 1 and text:
        text[0] = name.ljust(COLUMN) + text[0][COLUMN:]
    else:
        yield name
    yield from text


def _in_brief(text: str) -> str:
    """The first sentence and the default."""
    sentence, stop, rest = text.partition(". ")
    if " | " in sentence and stop:  # the choices
        more, _, rest = rest.partition(". ")
        sentence = f"{sentence}. {more}"
    default = text[text.rindex(" (") :] if text.endswith(")") and rest else ""
    return f"{sentence.rstrip('.')}.{default}"


def _wrapped(text: str, indent: int) -> list[str]:
    width = max(NARROWEST, shutil.get_terminal_size((100, 24)).columns)
    room = " " * indent
    return textwrap.wrap(text, width, initial_indent=room, subsequent_indent=room, break_on_hyphens=False)
