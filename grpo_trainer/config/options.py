"""One definition per option: a pydantic tree is read from flags and from TOML under the same names.

A field of a `Section` is an option. Its flag is its name with dashes, or what `option(flags=…)` says; the same name
(dashes or underscores) is its key in TOML. A root has options and sections of them for the code's sake, while flags and
keys are flat. One field of a root may be a union of sections, a choice: its members share the option `mode`, and an
option of a member that was not chosen is refused instead of ignored; but a flag may choose another than a file does.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from grpo_common.errors import Problem, UserError, wanted_by_pydantic
from grpo_trainer.config.values import at_home
from grpo_trainer.errors import ConfigError
from grpo_trainer.suggestions import unknown_key

log = logging.getLogger(__name__)

C = TypeVar("C", bound="Section")

TAG = "mode"
"""The field that names the member of a union of sections."""


SAME_AS = "The same as "
"""Begins the help of an option's second name."""


class Section(BaseModel):
    """A group of options: immutable, complete, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    means: ClassVar[str] = ""
    """Of a member of a union: what it stands for, in one line of help."""

    @field_validator("*")
    @classmethod
    def _at_home(cls, value: Any) -> Any:
        return at_home(value) if isinstance(value, Path) else value

    @classmethod
    def normalised(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """What flat values mean, where some stand for others."""
        return dict(given)


def option(default: Any = ..., *, help: str, flags: tuple[str, ...] = (), **constraints: Any) -> Any:
    """Declare an option of a `Section`.

    Args:
        default: its value when it is not given; left out, the option is required.
        help: one line for `--help`.
        flags: its flags, first the one that messages and TOML use; by default the field's name with dashes.
        constraints: pydantic's (`ge`, `gt`, `le`, …).
    """
    return Field(default, description=help, json_schema_extra={"flags": list(flags)}, **constraints)


def key_of(flag: str) -> str:
    """A flag's name in TOML: `lora_r` for `--lora-r`."""
    return flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Leaf:
    """One option of a tree: where it stands and what it is called.

    Attributes:
        path: names of its section, if it stands in one, and of itself.
        member: the member of a union that it belongs to; None: it belongs to no union.
        union: all members of that union.
    """

    path: tuple[str, ...]
    flags: tuple[str, ...]
    field: FieldInfo
    panel: str
    member: type[Section] | None = None
    union: tuple[type[Section], ...] = ()

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def key(self) -> str:
        """Its name in TOML and in messages, with underscores."""
        return key_of(self.flags[0])

    @property
    def is_bool(self) -> bool:
        return self.field.annotation in (bool, bool | None)

    @property
    def is_tag(self) -> bool:
        """Whether it chooses the member of a union."""
        return self.member is not None and self.name == TAG

    @property
    def default(self) -> Any:
        """Its value when it is not given; None also for one that is required."""
        return None if self.field.is_required() else self.field.get_default(call_default_factory=True)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it may have, where they can be listed."""
        if self.is_tag:
            return tuple(map(_tag_of, self.union))
        if get_origin(self.field.annotation) is Literal:
            return tuple(str(value) for value in get_args(self.field.annotation))
        return ()

    @property
    def meanings(self) -> dict[str, str]:
        """What each value means, of an option that chooses the member of a union."""
        return {_tag_of(member): member.means for member in self.union if member.means} if self.is_tag else {}

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


def leaves(root: type[Section]) -> Iterator[Leaf]:
    """Every option of a tree, depth first, union members one after the other; what chooses a member is its first."""
    for name, field in sorted(root.model_fields.items(), key=lambda item: item[0] != TAG):
        sections = _sections(field.annotation)
        for section in sections:
            in_union = {"member": section, "union": sections} if len(sections) > 1 else {}
            yield from (replace(leaf, path=(name, *leaf.path), **in_union) for leaf in leaves(section))
        if not sections:
            extra = field.json_schema_extra
            declared = extra.get("flags") if isinstance(extra, dict) else None
            flags = tuple(map(str, declared)) if isinstance(declared, list) and declared else ()
            panel = (inspect.getdoc(root) or root.__name__).splitlines()[0].rstrip(".")
            yield Leaf((name,), flags or (f"--{name.replace('_', '-')}",), field, panel)


def unique_leaves(root: type[Section]) -> list[Leaf]:
    """Options by key, once each: union members share options such as `mode`."""
    seen: dict[str, Leaf] = {}
    for leaf in leaves(root):
        seen.setdefault(leaf.key, leaf)
    return list(seen.values())


def _sections(annotation: Any) -> tuple[type[Section], ...]:
    """The sections that an annotation stands for: one, a union's members, or none."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    return kinds if all(isinstance(kind, type) and issubclass(kind, Section) for kind in kinds) else ()


def _tag_of(member: type[Section]) -> str:
    return str(get_args(member.model_fields[TAG].annotation)[0])


class _Tree:
    """The options of a root by their names."""

    def __init__(self, root: type[Section]) -> None:
        self.leaves = list(leaves(root))
        self.by_key: dict[str, list[Leaf]] = {}
        for leaf in self.leaves:
            for flag in leaf.flags:
                self.by_key.setdefault(key_of(flag), []).append(leaf)
        self.tag = next((leaf for leaf in self.leaves if leaf.is_tag), None)

    def key(self, written: str) -> str:
        """The first name of an option, whichever was written; of an unknown one what was written."""
        key = written.replace("-", "_")
        return self.by_key[key][0].key if key in self.by_key else key

    def picked(self, given: Mapping[str, Any]) -> Any:
        """The union member that values choose: the first one if they say nothing; None: the tree has no union."""
        if self.tag is None:
            return None
        return {self.key(written): value for written, value in given.items()}.get(self.tag.key, self.tag.choices[0])

    @cached_property
    def keys_of_members(self) -> dict[str, set[str]]:
        """A union member's name -> its options' keys."""
        return {
            _tag_of(member): {leaf.key for leaf in self.leaves if leaf.member is member}
            for member in (self.tag.union if self.tag else ())
        }


_tree = cache(_Tree)


# ---------------------------------------------------------------- values -> configuration


def build(root: type[C], given: Mapping[str, Any], *, where: str = "") -> C:
    """Build a configuration from flat values.

    Args:
        given: values by option key (dashes or underscores, any of an option's names).
        where: put before an option's name in messages, e.g. "server." for a table of a run's file.

    Raises:
        ConfigError: for each unknown key (suggesting the nearest), wrong value, missing one, and option that does not
            belong to what was chosen.
    """
    tree, given = _tree(root), root.normalised(given)
    picked = tree.picked(given)
    problems: list[Problem] = []
    said: dict[tuple[str, ...], str] = {}
    # Sections are there even if empty, so that what one lacks is reported by its own name.
    values: dict[str, Any] = {leaf.path[0]: {} for leaf in tree.leaves if len(leaf.path) > 1 and leaf.member is None}
    for written, value in given.items():
        candidates = tree.by_key.get(written.replace("-", "_"))
        if candidates is None:
            problems.append(unknown_key(written, [*tree.by_key], where))
            continue
        fitting = [leaf for leaf in candidates if leaf.member is None or leaf.is_tag or _tag_of(leaf.member) == picked]
        if not fitting and picked in tree.keys_of_members:  # another is reported as a wrong value of the mode
            problems.append(_foreign(candidates, picked, where))
            continue
        leaf = (fitting or candidates)[0]
        section = values.setdefault(leaf.path[0], {}) if len(leaf.path) > 1 else values
        flag = f"--{where}{written.replace('_', '-')}"
        if leaf.path in said and value != section[leaf.name]:
            got, why = f"{value} and {said[leaf.path]} {section[leaf.name]}", "two names of one option"
            problems.append(Problem(flag, got, fix="leave one out", summary=why))
        said[leaf.path] = flag
        section[leaf.name] = value
        if leaf.member is not None:
            section.setdefault(TAG, picked)
    config: C | None = None
    try:
        config = root.model_validate(values)
    except ValidationError as error:
        problems += _wrong_values(error, tree, root.__name__, where, said)
    if config is None or problems:
        raise ConfigError.of(list(dict.fromkeys(problems)))
    return config


def _foreign(candidates: list[Leaf], picked: str, where: str) -> Problem:
    """Return the problem of an option of union members that were not picked; it names them."""
    of = [_tag_of(leaf.member) for leaf in candidates if leaf.member is not None]
    mode = next(leaf for leaf in leaves(candidates[0].union[0]) if leaf.path == (TAG,)).flags[0]
    return Problem(
        f"--{where}{candidates[0].flags[0].removeprefix('--')}",
        got=f"{mode} {picked}",
        wanted=f"{mode} {', '.join(of)}",
        fix=f"leave it out, or choose {mode} {of[0]}",
        summary="belongs to another mode",
    )


def _wrong_values(
    error: ValidationError, tree: _Tree, root: str, where: str, said: Mapping[tuple[str, ...], str]
) -> Iterator[Problem]:
    """Yield what pydantic finds wrong, each with the option as it was written, what came, and what was wanted.

    A validator may raise a `UserError`; it need not know the field and the value. The values of a section are not
    shown: a key may be among them.
    """
    names = {leaf.path: leaf.flags[0] for leaf in tree.leaves}
    for finding in error.errors():
        parts = [part for part in finding["loc"] if isinstance(part, str) and part not in tree.keys_of_members]
        path = tuple(parts)
        name = names.get(path) or names.get((*path, TAG)) or ".".join(path) or root
        flag = said.get(path) or (f"--{where}{name.removeprefix('--')}" if where else name)
        got, context = str(finding["input"]) if path in names else "", finding.get("ctx", {})
        raised = context.get("error")
        if finding["type"] == "missing":
            yield Problem(flag, "nothing", "a value: it is required")
        elif finding["type"] == "union_tag_invalid":
            yield Problem(flag, str(context.get("tag")), f"one of {context.get('expected_tags')}")
        elif isinstance(raised, UserError):
            yield from (replace(each, field=each.field or flag, got=each.got or got) for each in raised.problems)
        else:
            wanted = wanted_by_pydantic(finding["msg"])
            yield Problem(flag, got, wanted[0].lower() + wanted[1:])


def given_keys(root: type[Section], given: Mapping[str, Any]) -> set[str]:
    """Return which options flat values set, each by its first name."""
    tree = _tree(root)
    return {tree.key(written) for written in root.normalised(given)}


def override(root: type[Section], given: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """Return flat values with those of `by` in place of the same options' earlier ones, under any of their names.

    If another member of a union is chosen, options that only the former has go, with a warning.
    """
    tree, replacing = _tree(root), root.normalised(by)
    gone = {tree.key(written) for written in (*replacing, *by)}
    if tree.tag is not None and tree.tag.key in gone:
        keys, now = tree.keys_of_members, tree.picked(replacing)
        former = keys.get(tree.picked(root.normalised(given)), set())
        foreign = former - keys.get(now, former)
        left_out = [written for written in given if tree.key(written) in foreign - gone]
        if left_out:
            names, flag = ", ".join(left_out), tree.tag.flags[0]
            log.warning("%s %s: left out the file's %s, which belong to its mode", flag, now, names)
        gone |= foreign
    return {**{written: value for written, value in given.items() if tree.key(written) not in gone}, **replacing}


def dump(config: Section, *, only_set: bool = False) -> dict[str, Any]:
    """A configuration as flat TOML values under its options' keys: `build(type(config), dump(config)) == config`."""
    values: dict[str, Any] = {}
    data = config.model_dump(mode="json", exclude_unset=only_set)
    for leaf in leaves(type(config)):
        in_section = len(leaf.path) > 1
        if leaf.member is not None and not isinstance(getattr(config, leaf.path[0]), leaf.member):
            continue
        value = (data.get(leaf.path[0], {}) if in_section else data).get(leaf.name)
        if value is not None:  # TOML has no null: an option that is None is left out
            values[leaf.key] = value
    return values


# ---------------------------------------------------------------- configuration -> Typer


def with_options(
    root: type[Section], *, prefix: str = "", hidden: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a Typer command a flag for each name of each option of a tree.

    The command is called with what the user gave, as `options={key: value}` (its other parameters stay). With a
    prefix, `--port` becomes `--server.port` and its key `server.port`.

    Args:
        hidden: keys that the command's help leaves out.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
        parameters: list[inspect.Parameter] = []
        keys: dict[str, tuple[str, bool]] = {}  # by a parameter: the option's, and whether it turns that off
        for leaf in unique_leaves(root):
            for flag in leaf.flags:
                made = list(_parameters(leaf, flag.removeprefix("--"), prefix, hidden=key_of(flag) in hidden))
                parameters += made
                keys |= {each.name: (prefix + key_of(flag), each is not made[0]) for each in made}

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


def _parameters(leaf: Leaf, name: str, prefix: str, *, hidden: bool) -> Iterator[inspect.Parameter]:
    """A flag, and for what can be on or off the one that turns it off.

    An option's second name is a separate flag, so that messages name what was written. The flag that turns an option
    off is hidden, and the option's help names it: another column would leave too little room for the names.
    """
    first = leaf.flags[0].removeprefix("--")
    text = leaf.help if name == first else f"{SAME_AS}--{prefix}{first}."
    kind: Any = bool | None if leaf.is_bool else str | None
    flags = [(name, text, "CHOICE" if leaf.choices else _metavar(leaf.field.annotation), hidden)]
    flags += [(f"no-{name}", "", "", True)] if leaf.is_bool else []
    for each, help_text, metavar, is_hidden in flags:
        flag = f"--{prefix}{each}"
        info = typer.Option(
            flag, help=help_text, metavar=metavar, show_default=False, rich_help_panel=leaf.panel, hidden=is_hidden
        )
        variable = f"{prefix}{each}".replace(".", "__").replace("-", "_")
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
