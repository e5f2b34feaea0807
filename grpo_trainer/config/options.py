"""One definition per option: a pydantic model is read from flags and from TOML under the same names.

A field of a `Section` is an option, and the text below it is its help. Its flag is its name with dashes; the same name
(dashes or underscores) is its key in TOML. A field that is a section itself, such as `server`, is a table in TOML, and
the flags of its options carry its name: `--server.port`. A section may say which options belong to which of its modes
(`mode_of`): one that belongs to another mode is refused instead of ignored.

What a file or a command line gives is a `Layer`: values by option key. Layers are merged, then made into a section.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from grpo_common.errors import Problem, UserError, collected, wanted_by_pydantic
from grpo_trainer.errors import ConfigError
from grpo_trainer.suggestions import unknown_key

log = logging.getLogger(__name__)

LARGEST_PORT = 65_535


def at_home(path: Path) -> Path:
    """Replace a leading `~` as a shell does. In a file no shell does it, and in `--run-dir=~/runs` none either."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path  # of no known user


class Section(BaseModel):
    """A group of options: immutable, complete, and without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

    mode_field: ClassVar[str] = ""
    """The option that chooses a mode, if there is one."""
    mode_of: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """The options that belong to some modes only, and those modes."""
    stands_for: ClassVar[Mapping[str, tuple[str, str]]] = MappingProxyType({})
    """Switches that stand for another option's value, and that option and value."""
    other_names: ClassVar[tuple[str, ...]] = ()
    """What its file has besides options; a misspelling of these is named, too."""

    @field_validator("*")
    @classmethod
    def _at_home(cls, value: Any) -> Any:
        return at_home(value) if isinstance(value, Path) else value


C = TypeVar("C", bound=Section)


def option(
    default: Any = ...,
    *others: str,
    flag: str = "",
    former: tuple[str, ...] = (),
    meanings: Mapping[str, str] | None = None,
    help: str | None = None,
    **constraints: Any,
) -> Any:
    """Declare an option of a `Section`; without a default it is required.

    Args:
        others: its further flags.
        flag: the flag that messages and TOML use; by default the field's name with dashes.
        former: flags that no help shows. They stand without the name of a table: `--vllm-port`.
        meanings: what each value means, a line of help each.
        help: where that is not the text below the field.
        constraints: pydantic's.
    """
    extra = {"flag": flag, "others": [*others], "former": [*former], "meanings": dict(meanings or {})}
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
    def about(self) -> str:
        """Its help in one line, without values and default."""
        return " ".join((self.field.description or "").split())

    @property
    def help(self) -> str:
        """What it does, a line for each value that is explained, its default."""
        text = self.about
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
                for inner in options_of(field.annotation):
                    flags = tuple(f"--{name}.{flag.removeprefix('--')}" for flag in inner.flags)
                    tables.append(replace(inner, path=(name, *inner.path), flags=flags))
                continue
            extra: Any = field.json_schema_extra or {}
            flags = (extra.get("flag") or f"--{name.replace('_', '-')}", *extra.get("others", ()))
            panel = (inspect.getdoc(owner) or owner.__name__).splitlines()[0].rstrip(".")
            former, meanings = tuple(extra.get("former", ())), extra.get("meanings", {})
            found[name] = Option((name,), flags, former, field, panel, meanings)
    return (*found.values(), *tables)


@cache
def by_name(root: type[Section]) -> Mapping[str, Option]:
    """Return the options of a section by each of their names, with underscores."""
    return {key_of(flag): each for each in options_of(root) for flag in (*each.flags, *each.former)}


# ---------------------------------------------------------------- values -> configuration


class Given(NamedTuple):
    """A value, and the option as it was written, as a flag."""

    value: Any
    flag: str


Layer = dict[str, Given]
"""By option key."""


def read(root: type[Section], problems: list[Problem], *tables: Mapping[str, Any]) -> Layer:
    """Return the values of a file or a command line, given by any of an option's names, with dashes or underscores.

    Values of a table may be nested. `problems` gets one for each unknown name, suggesting the nearest, and for two
    values of one option.
    """
    known, found = by_name(root), Layer()
    nested = {option.path[0] for option in options_of(root) if len(option.path) > 1}
    flat: list[tuple[str, Any]] = []
    for name, value in (pair for table in tables for pair in table.items()):
        is_table = name in nested and isinstance(value, Mapping)
        flat += [(f"{name}.{key}", inner) for key, inner in value.items()] if is_table else [(name, value)]
    for name, value in flat:
        option, given = known.get(name.replace("-", "_")), Given(value, f"--{name.replace('_', '-')}")
        if option is None:
            unknown = unknown_key(name, [*known, *root.other_names])
            problems.append(Problem(name, repr(value), f"a table: [{name}]") if name in nested else unknown)
            continue
        key = option.key
        if key in root.stands_for:
            key, meant = root.stands_for[key]
            if value in (False, "false"):
                continue
            given = Given(meant, given.flag)
        if key in found and found[key].value != given.value:
            got = f"{given.value} and {found[key].flag} {found[key].value}"
            problems.append(Problem(given.flag, got, "one value", "leave one out", "two names of one option"))
        found[key] = given
    return found


def merged(root: type[Section], *layers: Layer) -> Layer:
    """Return the values of all layers, of which later ones win.

    If a later layer chooses another mode, options of the mode before that this one has not go, with a warning.
    """
    result, mode_key = Layer(), root.mode_field
    for layer in layers:
        if mode_key in layer and (now := _mode(root, layer)) is not None:
            former = _mode(root, result)
            others = {key: root.mode_of.get(key, ()) for key in result if key not in layer}
            if gone := [key for key, of in others.items() if former in of and now not in of]:
                names = ", ".join(result.pop(key).flag for key in gone)
                flag = by_name(root)[mode_key].flags[0]
                warn("%s %s: left out the file's %s, which belong to its mode", flag, now, names)
        result = {**result, **layer}
    return result


def warn(text: str, *values: object) -> None:
    """Log a warning about options. Of the trainers that torchrun starts with the same options, the first one does."""
    if os.environ.get("RANK", "0") == "0":
        log.warning(text, *values)


def _mode(root: type[Section], layer: Layer) -> str | None:
    """Return the mode that values choose; None: the section has no modes, or the value is none of them."""
    if not root.mode_field:
        return None
    option = by_name(root)[root.mode_field]
    mode = layer[option.key].value if option.key in layer else option.default
    return mode if mode in option.choices else None


def make(root: type[C], layer: Layer) -> C:
    """Make a section from its values, or raise a `ConfigError` that names each wrong value, each missing one, and each
    option that does not belong to the chosen mode."""
    known, mode, problems = by_name(root), _mode(root, layer), list[Problem]()
    tree: dict[str, Any] = {}
    for key, given in layer.items():
        if mode is not None and mode not in (of := root.mode_of.get(key, (mode,))):
            flag, why = known[root.mode_field].flags[0], "belongs to another mode"
            fix = f"leave it out, or choose {flag} {of[0]}"
            problems.append(Problem(given.flag, f"{flag} {mode}", f"{flag} {', '.join(of)}", fix, why))
            continue
        *tables, name = known[key].path
        (tree.setdefault(tables[0], {}) if tables else tree)[name] = given.value
    config: C | None = None
    try:
        config = root.model_validate(tree)
    except ValidationError as error:
        problems += _wrong_values(error, root, layer)
    if config is None or problems:
        raise ConfigError.of(list(dict.fromkeys(problems)))
    return config


def build(root: type[C], *tables: Mapping[str, Any], problems: Iterable[Problem] = ()) -> C:
    """Make a section from the values of tables, of which later ones win; see `read`, `merged` and `make`.

    A `ConfigError` names unknown names, too, and the problems that were found before.
    """
    problems, config = [*problems], None
    layers = [read(root, problems, table) for table in tables]
    with collected(problems):
        config = make(root, merged(root, *layers))
    if config is None or problems:
        raise ConfigError.of(problems)
    return config


def _wrong_values(error: ValidationError, root: type[Section], layer: Layer) -> Iterator[Problem]:
    """Yield what pydantic finds wrong, each with the option as it was written, what came, and what was wanted.

    A validator may raise a `UserError`; it need not know the field and the value. The values of a table are not shown:
    a key may be among them.
    """
    options = {option.path: option for option in options_of(root)}
    order = list(options)
    found: list[tuple[tuple[str, ...], Any]] = []
    for wrong in error.errors():
        parts = tuple(map(str, wrong["loc"]))
        found.append((next((path for path in (parts[:2], parts[:1]) if path in options), ()), wrong))
    for path, wrong in sorted(found, key=lambda each: order.index(each[0]) if each[0] else 0):
        parts = tuple(map(str, wrong["loc"]))
        flag = ".".join(parts) or root.__name__
        if path in options:
            key = options[path].key
            flag = layer[key].flag if key in layer else options[path].flags[0]
        got, raised = str(wrong["input"]) if parts in options else "", wrong.get("ctx", {}).get("error")
        if wrong["type"] == "missing":
            yield Problem(flag, "nothing", "a value: it is required")
        elif isinstance(raised, UserError):
            yield from (replace(each, field=each.field or flag, got=each.got or got) for each in raised.problems)
        else:
            wanted = wanted_by_pydantic(wrong["msg"])
            yield Problem(flag, got, wanted[0].lower() + wanted[1:])


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


def shown(value: Any) -> str:
    """A value as a user would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


# ---------------------------------------------------------------- values as people write them


def parse_ranges(text: str) -> tuple[int, ...]:
    """Return `"28-29,0"` as `(0, 28, 29)`: ascending, each once; raise a `ConfigError` if it is no such list."""
    numbers: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(got=part or "nothing", wanted="numbers and ranges, such as 0-3,28-31")
        start, end = int(first), int(last) if dash else int(first)
        if not start <= end < 10_000:
            raise ConfigError(got=part, wanted="rising ranges below 10000, such as 0-3,28-31")
        numbers.update(range(start, end + 1))
    return tuple(sorted(numbers))


Ranges = Annotated[
    tuple[int, ...],
    BeforeValidator(lambda value: parse_ranges(shown(value)) if isinstance(value, (str, list, tuple)) else value),
]
"""Numbers that `parse_ranges` reads, as text or as a list: ascending, each once."""


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


Arguments = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: split_arguments(value) if isinstance(value, str) else value)
]
"""Further arguments of a process."""


COMMA_SEPARATED = BeforeValidator(
    lambda value: [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value
)
"""Of a tuple of words."""


def from_variable(name: str) -> BeforeValidator:
    """Of a secret: without a value it is that of an environment variable, which no list of processes shows."""
    return BeforeValidator(lambda value: value or os.environ.get(name) or None)
