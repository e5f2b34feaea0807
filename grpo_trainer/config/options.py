"""One definition per option: a pydantic model is read from flags and from TOML under the same names.

A field of a `Section` is an option. Its flag is its name with dashes, or what `option(flags=…)` says; the same name
(dashes or underscores) is its key in TOML. A field that is a section itself, such as `server`, is a table in TOML, and
the flags of its options carry its name: `--server.port`. A section may say which options belong to which of its modes
(`mode_of`): one that belongs to another mode is refused instead of ignored.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from keyword import iskeyword
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from grpo_common.errors import Problem, UserError, wanted_by_pydantic
from grpo_trainer.config.values import at_home
from grpo_trainer.errors import ConfigError
from grpo_trainer.suggestions import unknown_key

log = logging.getLogger(__name__)

C = TypeVar("C", bound="Section")
SAME_AS = "The same as "
"""Begins the help of an option's second name."""


class Section(BaseModel):
    """A group of options: immutable, complete, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    mode_field: ClassVar[str] = ""
    """The option that chooses a mode, if there is one."""
    mode_of: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """The options that belong to some modes only, and those modes."""

    @field_validator("*")
    @classmethod
    def _at_home(cls, value: Any) -> Any:
        return at_home(value) if isinstance(value, Path) else value

    @classmethod
    def normalised(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """What flat values mean, where some stand for others."""
        return dict(given)


def option(
    default: Any = ...,
    *,
    help: str,
    flags: tuple[str, ...] = (),
    former: tuple[str, ...] = (),
    meanings: Mapping[str, str] | None = None,
    **constraints: Any,
) -> Any:
    """Declare an option of a `Section`.

    Args:
        default: its value when it is not given; left out, the option is required.
        help: one line for `--help`.
        flags: its flags, first the one that messages and TOML use; by default the field's name with dashes.
        former: further flags, which no help shows. They stand without the name of a table: `--vllm-port`.
        meanings: what each value means, a line of help each.
        constraints: pydantic's (`ge`, `gt`, `le`, …).
    """
    extra = {"flags": list(flags), "former": list(former), "meanings": dict(meanings or {})}
    return Field(default, description=help, json_schema_extra=extra, **constraints)


def key_of(flag: str) -> str:
    """A flag's name in TOML: `lora_r` for `--lora-r`."""
    return flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Option:
    """One option of a section."""

    path: tuple[str, ...]
    """Names of its table, if it stands in one, and of its field."""
    flags: tuple[str, ...]
    """The first is used by messages and TOML."""
    former: tuple[str, ...]
    field: FieldInfo
    panel: str
    """The topic under which the help lists it."""
    meanings: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def key(self) -> str:
        """Its name in TOML and in messages, with underscores: `lr`, `server.port`."""
        return key_of(self.flags[0])

    @property
    def is_bool(self) -> bool:
        return self.field.annotation in (bool, bool | None)

    @property
    def default(self) -> Any:
        """Its value when it is not given; None also for one that is required."""
        return None if self.field.is_required() else self.field.get_default(call_default_factory=True)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it may have, where they can be listed."""
        is_literal = get_origin(self.field.annotation) is Literal
        return tuple(map(str, get_args(self.field.annotation))) if is_literal else ()

    @property
    def help(self) -> str:
        """What it does, a line for each value that is explained, its default."""
        text = self.field.description or ""
        if self.field.is_required():
            text += " (required)"
        if self.is_bool and self.default is not False:
            off = f"off: --no-{self.flags[0].removeprefix('--')}"
            text += f" (default: on; {off})" if self.default else f" ({off})"
        elif self.default not in (None, ()) and "(default" not in text:  # where the text explains it
            text += f" (default: {shown(self.default)})"
        if self.meanings:
            return "\n\n".join([text, *(f"{value}: {meaning}" for value, meaning in self.meanings.items())])
        return f"{' | '.join(self.choices)}. {text}" if len(self.choices) > 1 else text


@cache
def options_of(root: type[Section]) -> tuple[Option, ...]:
    """Return every option of a section: its own, those of the classes that it inherits, then those of its tables."""
    found: dict[str, Option] = {}
    tables: list[Option] = []
    for owner in root.__mro__:
        for name in inspect.get_annotations(owner):
            field = root.model_fields.get(name)
            if field is None or name in found:
                continue
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                for each in options_of(field.annotation):
                    flags = tuple(f"--{name}.{flag.removeprefix('--')}" for flag in each.flags)
                    tables.append(replace(each, path=(name, *each.path), flags=flags))
                continue
            extra: Any = field.json_schema_extra or {}
            flags = tuple(extra.get("flags") or (f"--{name.replace('_', '-')}",))
            panel = (inspect.getdoc(owner) or owner.__name__).splitlines()[0].rstrip(".")
            former, meanings = tuple(extra.get("former", ())), extra.get("meanings", {})
            found[name] = Option((name,), flags, former, field, panel, meanings)
    return (*found.values(), *tables)


@cache
def _by_name(root: type[Section]) -> dict[str, Option]:
    return {key_of(flag): each for each in options_of(root) for flag in (*each.flags, *each.former)}


def _option_named(root: type[Section], name: str) -> Option | None:
    return _by_name(root).get(name.replace("-", "_"))


# ---------------------------------------------------------------- values -> configuration


def flat(root: type[Section], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with those of tables by dotted names: `{"server": {"port": 1}}` as `{"server.port": 1}`."""
    tables = {each.path[0] for each in options_of(root) if len(each.path) > 1}
    found: dict[str, Any] = {}
    for name, value in given.items():
        is_table = name in tables and isinstance(value, Mapping)
        found |= {f"{name}.{key}": inner for key, inner in value.items()} if is_table else {name: value}
    return found


def build(root: type[C], given: Mapping[str, Any], *, where: str = "") -> C:
    """Build a configuration from values.

    Args:
        given: values by option key (dashes or underscores, any of an option's names); those of a table may be nested.
        where: put before an option's name in messages, e.g. "api." for a table of a run's file.

    Raises:
        ConfigError: for each unknown key (suggesting the nearest), wrong value, missing one, and option that does not
            belong to the chosen mode.
    """
    given = flat(root, root.normalised(given))
    problems: list[Problem] = []
    values: dict[tuple[str, ...], Any] = {}
    written: dict[tuple[str, ...], str] = {}
    mode = _mode(root, given)
    for name, value in given.items():
        each, flag = _option_named(root, name), f"--{where}{name.replace('_', '-')}"
        if each is None and any(option.path[0] == name for option in options_of(root)):
            problems.append(Problem(f"{where}{name}", repr(value), f"a table: [{where}{name}]"))
        elif each is None:
            problems.append(unknown_key(name, [*_by_name(root)], where))
        elif mode is not None and mode not in root.mode_of.get(each.name, (mode,)):
            problems.append(_of_another_mode(root, each, mode, where))
        else:
            if each.path in values and value != values[each.path]:
                got, why = f"{value} and {written[each.path]} {values[each.path]}", "two names of one option"
                problems.append(Problem(flag, got, "one value", "leave one out", why))
            values[each.path], written[each.path] = value, flag
    tree: dict[str, Any] = {}
    for (*tables, name), value in values.items():
        (tree.setdefault(tables[0], {}) if tables else tree)[name] = value
    config: C | None = None
    try:
        config = root.model_validate(tree)
    except ValidationError as error:
        problems += _wrong_values(error, root, where, written)
    if config is None or problems:
        raise ConfigError.of(list(dict.fromkeys(problems)))
    return config


def _mode(root: type[Section], given: Mapping[str, Any]) -> str | None:
    """Return the mode that flat values choose; None: the section has no modes, or the value is none of them."""
    if not root.mode_field:
        return None
    chosen = _by_name(root)[root.mode_field]
    said = [value for name, value in given.items() if _option_named(root, name) == chosen]
    mode = said[-1] if said else chosen.default
    return mode if mode in chosen.choices else None


def _of_another_mode(root: type[Section], option: Option, mode: str, where: str) -> Problem:
    chosen, of = _by_name(root)[root.mode_field].flags[0], root.mode_of[option.name]
    return Problem(
        f"--{where}{option.flags[0].removeprefix('--')}",
        got=f"{chosen} {mode}",
        wanted=f"{chosen} {', '.join(of)}",
        fix=f"leave it out, or choose {chosen} {of[0]}",
        summary="belongs to another mode",
    )


def _wrong_values(
    error: ValidationError, root: type[Section], where: str, written: Mapping[tuple[str, ...], str]
) -> Iterator[Problem]:
    """Yield what pydantic finds wrong, each with the option as it was written, what came, and what was wanted.

    A validator may raise a `UserError`; it need not know the field and the value. The values of a table are not shown:
    a key may be among them.
    """
    names = {each.path: each.flags[0] for each in options_of(root)}
    order = list(names)
    found: list[tuple[tuple[str, ...], Any]] = []
    for wrong in error.errors():
        parts = tuple(map(str, wrong["loc"]))
        found.append((next((path for path in (parts[:2], parts[:1]) if path in names), ()), wrong))
    for path, wrong in sorted(found, key=lambda each: order.index(each[0]) if each[0] else 0):
        parts = tuple(map(str, wrong["loc"]))
        name = names.get(path) or ".".join(parts) or root.__name__
        flag = written.get(path) or (f"--{where}{name.removeprefix('--')}" if where else name)
        got, raised = str(wrong["input"]) if parts in names else "", wrong.get("ctx", {}).get("error")
        if wrong["type"] == "missing":
            yield Problem(flag, "nothing", "a value: it is required")
        elif isinstance(raised, UserError):
            yield from (replace(each, field=each.field or flag, got=each.got or got) for each in raised.problems)
        else:
            wanted = wanted_by_pydantic(wrong["msg"])
            yield Problem(flag, got, wanted[0].lower() + wanted[1:])


def given_keys(root: type[Section], given: Mapping[str, Any]) -> set[str]:
    """Return which options values set, each by its first name; an unknown one as it was written."""
    return _keys(root, flat(root, root.normalised(given)))


def _keys(root: type[Section], names: Iterable[str]) -> set[str]:
    return {each.key if (each := _option_named(root, name)) else name.replace("-", "_") for name in names}


def override(root: type[Section], given: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with those of `by` in place of the same options' earlier ones, under any of their names.

    If another mode is chosen, options that belong to the former mode and not to this one go, with a warning.
    """
    given, replacing = flat(root, given), flat(root, root.normalised(by))
    gone = _keys(root, [*replacing, *flat(root, by)])
    if root.mode_field in gone:
        former, now = _mode(root, root.normalised(given)), _mode(root, replacing)
        foreign = {name for name, of in root.mode_of.items() if former in of and now is not None and now not in of}
        keys = {each.key for each in options_of(root) if each.name in foreign}
        left_out = [name for name in given if _keys(root, [name]) & (keys - gone)]
        if left_out:
            names, flag = ", ".join(left_out), _by_name(root)[root.mode_field].flags[0]
            log.warning("%s %s: left out the file's %s, which belong to its mode", flag, now, names)
        gone |= keys
    return {**{name: value for name, value in given.items() if not _keys(root, [name]) & gone}, **replacing}


def dump(config: Section, *, only_set: bool = False) -> dict[str, Any]:
    """A configuration as TOML values under its options' keys: `build(type(config), dump(config)) == config`."""
    data = config.model_dump(mode="json", exclude_unset=only_set)
    mode = getattr(config, config.mode_field) if config.mode_field else None
    values: dict[str, Any] = {}
    for each in options_of(type(config)):
        *tables, name = each.path
        value = (data.get(tables[0], {}) if tables else data).get(name)
        if value is not None and mode in config.mode_of.get(name, (mode,)):  # TOML has no null
            table = values.setdefault(tables[0], {}) if tables else values
            table[each.key.rpartition(".")[2]] = value
    return values


# ---------------------------------------------------------------- configuration -> Typer


def with_options(
    root: type[Section], *, prefix: str = "", hidden: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a Typer command a flag for each name of each option of a section.

    The command is called with what the user gave, as `options={key: value}` (its other parameters stay). With a
    prefix, `--port` becomes `--api.port` and its key `api.port`.

    Args:
        hidden: keys that the command's help leaves out.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
        parameters: list[inspect.Parameter] = []
        keys: dict[str, tuple[str, bool]] = {}  # by a parameter: the option's, and whether it turns that off
        for each in options_of(root):
            for flag in (*each.flags, *each.former):
                is_hidden = flag in each.former or each.key in hidden
                made = list(_parameters(each, flag.removeprefix("--"), prefix, hidden=is_hidden))
                parameters += made
                keys |= {one.name: (prefix + key_of(flag), one is not made[0]) for one in made}

        def wrapped(**values: Any) -> None:
            given = {name: values.pop(name) for name in list(values) if name in keys}
            given = {name: value for name, value in given.items() if value is not None}
            options = {keys[name][0]: not value if keys[name][1] else value for name, value in given.items()}
            command(options={**values.pop("options", {}), **options}, **values)

        wrapped.__name__ = command.__name__
        wrapped.__doc__ = command.__doc__
        wrapped.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *parameters]}
        return wrapped

    return decorate


def _parameters(each: Option, name: str, prefix: str, *, hidden: bool) -> Iterator[inspect.Parameter]:
    """A flag, and for what can be on or off the one that turns it off.

    An option's second name is a separate flag, so that messages name what was written. The flag that turns an option
    off is hidden, and the option's help names it: another column would leave too little room for the names.
    """
    first = each.flags[0].removeprefix("--")
    text = each.help if name == first else f"{SAME_AS}--{prefix}{first}."
    kind: Any = bool | None if each.is_bool else str | None
    flags = [(name, text, "CHOICE" if each.choices else _metavar(each.field.annotation), hidden)]
    flags += [(f"no-{name}", "", "", True)] if each.is_bool else []
    for flag, help_text, metavar, is_hidden in flags:
        info = typer.Option(
            f"--{prefix}{flag}",
            help=help_text,
            metavar=metavar,
            show_default=False,
            rich_help_panel=each.panel,
            hidden=is_hidden,
        )
        variable = f"{prefix}{flag}".replace(".", "__").replace("-", "_")
        variable += "_" if iskeyword(variable) else ""
        yield inspect.Parameter(
            variable, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
        )


def first_name(text: str) -> str:
    """The flag of which the flag with this help is a second name; empty: of none."""
    return text.removeprefix(SAME_AS).removesuffix(".") if text.startswith(SAME_AS) else ""


def _metavar(annotation: Any) -> str:
    kinds = [arg for arg in (get_args(annotation) or (annotation,)) if arg is not type(None)]
    names = {int: "INT", float: "FLOAT", Path: "PATH", bool: " "}
    return names.get(kinds[0], "TEXT") if kinds else "TEXT"


def shown(default: Any) -> str:
    """A default as a user would write it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, (list, tuple)):
        return ",".join(str(value) for value in default)
    return str(default)
