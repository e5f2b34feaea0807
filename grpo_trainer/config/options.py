"""One definition per option: a pydantic tree is read from flags and from TOML under the same names.

A field of a `Section` is an option. Its flag is its name with dashes, or what `option(flags=…)` says; the same name
(dashes or underscores) is its key in TOML. Sections nest inside a configuration for the code's sake, while flags and
keys stay flat. A field that is a union of sections is a choice: its members share a discriminator option, and an
option of a member that was not chosen is refused instead of ignored; but a flag may choose another than a file does.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from grpo_common.errors import Problem
from grpo_trainer.config.findings import Place, problems_of
from grpo_trainer.errors import ConfigError
from grpo_trainer.suggestions import unknown_key

log = logging.getLogger(__name__)

C = TypeVar("C", bound="Section")

TAG = "mode"
"""The field by which the members of a union of sections are told apart."""


class Section(BaseModel):
    """A group of options: immutable, complete, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    means: ClassVar[str] = ""
    """Of a member of a union: what it stands for, in one line of help."""

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


@dataclass(frozen=True)
class Leaf:
    """One option of a tree: where it stands and what it is called."""

    path: tuple[str, ...]
    flags: tuple[str, ...]
    field: FieldInfo
    panel: str
    choice: type[Section] | None  # the union member it belongs to, if any

    @property
    def key(self) -> str:
        """Its name in TOML and in messages, with underscores."""
        return key_of(self.flags[0])

    @property
    def is_bool(self) -> bool:
        return self.field.annotation in (bool, bool | None)


def key_of(flag: str) -> str:
    """A flag's name in TOML: `lora_r` for `--lora-r`."""
    return flag.removeprefix("--").replace("-", "_")


def leaves(root: type[Section], path: tuple[str, ...] = (), choice: type[Section] | None = None) -> Iterator[Leaf]:
    """Every option of a tree, depth first, union members one after the other; what chooses a member is its first."""
    for name, field in sorted(root.model_fields.items(), key=lambda item: item[0] != TAG):
        members = _sections(field.annotation)
        for member in members:
            yield from leaves(member, (*path, name), member if len(members) > 1 else choice)
        if not members:
            extra = field.json_schema_extra
            declared = extra.get("flags") if isinstance(extra, dict) else None
            flags = tuple(str(f) for f in declared) if isinstance(declared, list) and declared else ()
            panel = (inspect.getdoc(root) or root.__name__).splitlines()[0].rstrip(".")
            yield Leaf((*path, name), flags or (f"--{name.replace('_', '-')}",), field, panel, choice)


def _sections(annotation: Any) -> tuple[type[Section], ...]:
    """The sections that an annotation stands for: one, a union's members, or none."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _sections(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        found = tuple(member for arg in get_args(annotation) for member in _sections(arg))
        return found if len(found) == len(get_args(annotation)) else ()
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return ()


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
    problems: list[Problem] = []
    given = root.normalised(given)
    tree: dict[str, Any] = {}
    said: dict[tuple[str, ...], str] = {}
    by_key: dict[str, list[Leaf]] = {}
    for leaf in leaves(root):
        if leaf.choice is None and len(leaf.path) > 1:
            tree.setdefault(leaf.path[0], {})  # so that what a section lacks is reported by its own name
        for flag in leaf.flags:
            by_key.setdefault(key_of(flag), []).append(leaf)
    for raw_key, value in given.items():
        candidates = by_key.get(raw_key.replace("-", "_"))
        if candidates is None:
            problems.append(unknown_key(raw_key, [leaf.key for leaf in leaves(root)], where))
            continue
        leaf = _chosen(candidates, given, by_key, where)
        if isinstance(leaf, Problem):
            problems.append(leaf)
            continue
        flag = f"--{where}{raw_key.replace('_', '-')}"
        if leaf.path in said and value != _placed(tree, leaf.path):
            former = f"{said[leaf.path]} {_placed(tree, leaf.path)}"
            summary = "two names of one option"
            problems.append(Problem(flag, f"{value} and {former}", fix="leave one out", summary=summary))
        said[leaf.path] = flag
        _place(tree, leaf.path, value)
        if leaf.choice is not None and not _is_tag(leaf):
            _place(tree, (*leaf.path[:-1], TAG), _tag_of(leaf.choice))
    config: C | None = None
    try:
        config = root.model_validate(tree)
    except ValidationError as error:
        problems += problems_of(error, _flag_at(root, where, said))
    if config is None or problems:
        raise ConfigError.of(list(dict.fromkeys(problems)))
    return config


def override(root: type[Section], given: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """Flat values, of which some are given anew, under whichever of an option's names.

    If another member of a union is chosen, options that only the former has go, with a warning.
    """
    keys = {key_of(flag): leaf.key for leaf in leaves(root) for flag in leaf.flags}

    def first_name(written: str) -> str:
        key = written.replace("-", "_")
        return keys.get(key, key)

    given_anew = root.normalised(by)
    anew = {first_name(written): value for written, value in given_anew.items()}
    former = {first_name(written): value for written, value in root.normalised(given).items()}
    gone = {*anew, *map(first_name, by)}
    for tag in filter(_is_tag, unique_leaves(root)):
        foreign = _foreign(root, tag, former.get(tag.key, _default_tag([tag])), anew.get(tag.key))
        left_out = [written for written in given if first_name(written) in foreign - gone]
        if left_out:
            written = ", ".join(left_out)
            log.warning("%s %s: left out the file's %s, which belong to its mode", tag.flags[0], anew[tag.key], written)
        gone |= foreign
    return {**{written: value for written, value in given.items() if first_name(written) not in gone}, **given_anew}


def _foreign(root: type[Section], tag: Leaf, former: Any, picked: Any) -> set[str]:
    """Keys that the former member of a union has and the newly picked one has not; none if nothing is newly picked."""
    members: dict[str, set[str]] = {}
    for leaf in leaves(root):
        if leaf.choice is not None and leaf.path[:-1] == tag.path[:-1]:
            members.setdefault(_tag_of(leaf.choice), set()).add(leaf.key)
    if former not in members or picked not in members:
        return set()
    return members[former] - members[picked]


def split_arguments(text: str) -> tuple[str, ...]:
    """Split at commas, but not within quotes, brackets or braces: an argument may be JSON.

    `--seed,7` gives two words, `--compilation-config={"level":3,"backend":""}` one.
    """
    words, depth, quoted = [""], 0, False
    for position, sign in enumerate(text):
        if sign == '"' and text[position - 1 : position] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (sign in "[{") - (sign in "]}")
        if sign == "," and not quoted and depth <= 0:
            words.append("")
        else:
            words[-1] += sign
    return tuple(word for word in words if word)


def _placed(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = tree
    for name in path:
        value = value[name]
    return value


def _place(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    node = tree
    for name in path[:-1]:
        node = node.setdefault(name, {})
    node[path[-1]] = value


def _chosen(
    candidates: list[Leaf], given: Mapping[str, Any], by_key: Mapping[str, list[Leaf]], where: str
) -> Leaf | Problem:
    """The candidate whose union member the discriminator picks; a problem names the members that would have it."""
    first = candidates[0]
    if first.choice is None:
        return first
    selector = next(
        leaf for leaves_ in by_key.values() for leaf in leaves_ if leaf.choice is first.choice and _is_tag(leaf)
    )
    normalised = {key.replace("-", "_"): value for key, value in given.items()}
    picked = normalised.get(selector.key, _default_tag(by_key[selector.key]))
    for leaf in candidates:
        if leaf.choice is not None and (_is_tag(leaf) or _tag_of(leaf.choice) == picked):
            return leaf
    known = [_tag_of(leaf.choice) for leaf in by_key[selector.key] if leaf.choice is not None]
    if picked not in known:
        return Problem(selector.flags[0], str(picked), f"one of {', '.join(map(repr, known))}")
    fitting = ", ".join(_tag_of(leaf.choice) for leaf in candidates if leaf.choice is not None)
    name = f"--{where}{first.flags[0].removeprefix('--')}"
    return Problem(
        name,
        got=f"{selector.flags[0]} {picked}",
        wanted=f"{selector.flags[0]} {fitting}",
        fix=f"leave it out, or choose {selector.flags[0]} {fitting.split(',')[0]}",
        summary="belongs to another mode",
    )


def _is_tag(leaf: Leaf) -> bool:
    return leaf.choice is not None and leaf.path[-1] == TAG


def _tag_of(member: type[Section]) -> str:
    return str(get_args(member.model_fields[TAG].annotation)[0])


def _default_tag(tags: list[Leaf]) -> str:
    """The first member of a union is what stands when nothing was chosen."""
    assert tags[0].choice is not None
    return _tag_of(tags[0].choice)


def _flag_at(
    root: type[Section], where: str, said: Mapping[tuple[str, ...], str]
) -> Callable[[Place], tuple[str, bool]]:
    """Return what names a place in the values as the user wrote it, and says whether an option stands there."""
    names = {leaf.path: leaf.flags[0] for leaf in leaves(root)}
    tags = {_tag_of(leaf.choice) for leaf in leaves(root) if leaf.choice is not None}

    def flag_at(place: Place) -> tuple[str, bool]:
        path = tuple(str(part) for part in place if str(part) not in tags and not isinstance(part, int))
        name = names.get(path) or names.get((*path, TAG)) or ".".join(path) or root.__name__
        return said.get(path) or (f"--{where}{name.removeprefix('--')}" if where else name), path in names

    return flag_at


def dump(config: Section, *, only_set: bool = False) -> dict[str, Any]:
    """A configuration as flat TOML values under its options' keys: `build(type(config), dump(config)) == config`."""
    values: dict[str, Any] = {}
    data = config.model_dump(mode="json", exclude_unset=only_set)
    for leaf in leaves(type(config)):
        node: Any = config
        for name in leaf.path[:-1]:
            node = getattr(node, name)
        if leaf.choice is not None and not isinstance(node, leaf.choice):
            continue
        value: Any = data
        for name in leaf.path:
            value = value.get(name) if isinstance(value, dict) else None
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
                key = key_of(flag)
                made = [_parameter(leaf, flag, prefix, root, hidden=key in hidden)]
                if leaf.is_bool:
                    made.append(_negative(leaf, flag, prefix))
                parameters += made
                keys |= {each.name: (prefix + key, each is not made[0]) for each in made}

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


def unique_leaves(root: type[Section]) -> list[Leaf]:
    """Options by key, once each: union members share options such as the discriminator."""
    seen: dict[str, Leaf] = {}
    for leaf in leaves(root):
        seen.setdefault(leaf.key, leaf)
    return list(seen.values())


def _parameter(leaf: Leaf, flag: str, prefix: str, root: type[Section], *, hidden: bool) -> inspect.Parameter:
    """A flag; an option's second name is one of its own, so that messages name what was written."""
    annotation: Any = bool | None if leaf.is_bool else str | None
    metavar = "CHOICE" if choices(leaf, root) else _metavar(leaf.field.annotation)
    text = (
        help_text(leaf, root) if flag == leaf.flags[0] else f"The same as --{prefix}{leaf.flags[0].removeprefix('--')}."
    )
    return _typed(f"{prefix}{flag.removeprefix('--')}", annotation, text, metavar, leaf.panel, hidden=hidden)


def _negative(leaf: Leaf, flag: str, prefix: str) -> inspect.Parameter:
    """What turns an option off. Its help is that of the option: in a column of its own it would cut all names short."""
    return _typed(f"{prefix}no-{flag.removeprefix('--')}", bool | None, "", "", leaf.panel, hidden=True)


def _typed(name: str, annotation: Any, text: str, metavar: str, panel: str, *, hidden: bool) -> inspect.Parameter:
    info = typer.Option(
        f"--{name}", help=text, metavar=metavar, show_default=False, rich_help_panel=panel, hidden=hidden
    )
    variable = name.replace(".", "__").replace("-", "_")
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(variable, kind, default=None, annotation=Annotated[annotation, info])


def help_text(leaf: Leaf, root: type[Section]) -> str:
    """An option's help: what it does, a line for each value that is explained, its default."""
    text = leaf.field.description or ""
    allowed = choices(leaf, root)
    explained = described(leaf, root)
    if leaf.field.is_required():
        text += " (required)"
    default = None if leaf.field.is_required() else leaf.field.get_default(call_default_factory=True)
    off = f"--no-{leaf.flags[0].removeprefix('--')}"
    if leaf.is_bool and default is not False:
        text += f" (default: on; off: {off})" if default else f" (off: {off})"
    elif default is not None and default != () and "(default" not in text:  # where the text explains it
        text += f" (default: {shown(default)})"
    if explained:
        return "\n\n".join([text, *(f"{value}: {meaning}" for value, meaning in explained.items())])
    return f"{' | '.join(allowed)}. {text}" if len(allowed) > 1 else text


def choices(leaf: Leaf, root: type[Section]) -> tuple[str, ...]:
    """The values that an option may have, where they can be listed."""
    if _is_tag(leaf):
        return tuple(
            _tag_of(other.choice) for other in leaves(root) if other.choice and other.key == leaf.key and _is_tag(other)
        )
    if get_origin(leaf.field.annotation) is Literal:
        return tuple(str(value) for value in get_args(leaf.field.annotation))
    return ()


def described(leaf: Leaf, root: type[Section]) -> dict[str, str]:
    """What each value of a discriminator means: `Section.means` of each member."""
    if not _is_tag(leaf):  # as nearly all: the tree is not looked through for each of hundreds of options
        return {}
    members = [other.choice for other in leaves(root) if other.choice and other.key == leaf.key and _is_tag(other)]
    return {_tag_of(member): member.means for member in members if member.means}


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
