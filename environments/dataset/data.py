"""Read a data set, a file, a folder, or a name on the hub; and find the prompt and the right answer of a row.

JSON and CSV are read here, into memory; everything else by the library `datasets`, which caches it, memory-mapped,
outside the user's folder. `datasets` turns JSON text such as "2024-01-01" into a timestamp, and its errors name no
line. It reads CSV by pandas, which makes whole numbers fractions if a cell is empty, and moves the cells of long rows.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
import re
import string
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from environments.config import ConfigError, UnusableRow
from environments.data_config import DataConfig
from environments.maths.answer_form import read_number
from environments.trajectory import Message
from environments.user_modules import expanded
from grpo_common.suggest import OF_FILES, nearest
from grpo_common.text import printable

log = logging.getLogger(__name__)

CHECKED_WHOLE: Final = 200 << 20
"""Bytes of files up to which every row is checked before the start."""
SAMPLED_ROWS: Final = 1000
"""Rows of larger data that are checked before the start, and that tell which columns there are."""
FORMATS: Final = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "JSON"),
    **{".csv": "CSV", ".tsv": "CSV", ".parquet": "parquet", ".arrow": "arrow"},
}
"""Of files, by their ending."""
COMPRESSED: Final = (".gz", ".zst", ".bz2", ".xz")
KINDS: Final = "a .jsonl, .json, .csv, .tsv or .parquet file"
SAVED: Final = ("dataset_dict.json", "state.json")
"""Files of folders that `datasets` saved: a data set with splits, and one without."""
MARKS: Final = ("*", "?", "[", "::")
"""What `datasets` reads in a path as a pattern, or as a URL in a URL."""
NUMBER: Final = re.compile(r"\s*[+-]?([0-9]{1,200}(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\s*")
WORDS: Final = {"true": True, "false": False}
END: Final = "\x1e"
"""The last line of a CSV file as it is read. If it is within a cell, a quote before it is open."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """The rows of one file or table."""

    name: str  # the file's name in its folder; empty: there is only one
    unit: str  # what `numbers` count from 0, for messages: `line` or `row`
    values: Any  # rows, or lines of JSON
    numbers: Sequence[int]  # the places in `values` that have a row: lines that are not blank


class Rows:
    """The rows of a data set, by number from 0. A key that a JSON object lacks is None."""

    def __init__(self, field: str, parts: Sequence[Part], columns: Sequence[str] = ()) -> None:
        self.columns = tuple(columns)
        self._field, self._parts = field, parts
        self._ends = list(accumulate(len(part.numbers) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def place(self, number: int) -> str:
        """Return where a row is, for messages: a line of a file, or a row counted from 1."""
        part, own = self._find(number)
        return f"{f'{part.name}, ' if part.name else ''}{part.unit} {own + 1}"

    def _find(self, number: int) -> tuple[Part, int]:
        place = bisect_right(self._ends, number)
        part = self._parts[place]
        return part, part.numbers[number - (self._ends[place - 1] if place else 0)]

    def __getitem__(self, number: int) -> Row:
        """Return a row, or raise UnusableRow if it is not a JSON object."""
        part, own = self._find(number)
        value, why = part.values[own], ""
        if part.unit == "line":
            try:
                value = _decode(value)
            except (ValueError, RecursionError) as error:
                value, why = None, f" ({_first_line(error)})"
        if isinstance(value, dict):
            return dict.fromkeys(self.columns) | value
        text = part.values[own].decode(errors="replace") if part.unit == "line" else repr(value)
        fix = "put each row on a line, as {…}" if isinstance(value, list) else f"correct or remove the {part.unit}"
        field = f"{self._field}, {self.place(number)}"
        raise UnusableRow(field=field, got=f"{printable(text.strip(), 80)}{why}", wanted="one JSON object", fix=fix)


@dataclass(frozen=True)
class Data:
    """A data set that was opened."""

    name: str  # as messages call it
    rows: Rows
    whole: bool  # small enough to check every row before the start
    fingerprint: str  # changes if the content does
    split: str | None = None  # also if the settings name none; None: it has no splits

    def checked(self) -> range:
        """Return the numbers of the rows to check before the start."""
        return range(len(self.rows) if self.whole else min(len(self.rows), SAMPLED_ROWS))


def read_data(config: DataConfig, *, prompts: bool = True, answers: bool = True) -> tuple[Data, Data | None]:
    """Return the data set of the settings, and that of `held_out_split` if it is set; raise as `read_source`.

    Of a table in text, the columns of `prompts` and right `answers`, if there are any, are read as text.
    """
    assert config.path is not None, "the environment asks for --data first"
    field, flag = f"--data {config.path}", "--data.held_out_split"
    texts: list[Sequence[str]] = []
    if prompts and config.prompt_template is not None:
        texts += [(name,) for name in _names_in(config.prompt_template)]
    elif prompts:
        texts.append((config.prompt_column,) if config.prompt_column else PROMPT_COLUMNS)
    if answers or config.answer_column:
        texts.append((config.answer_column,) if config.answer_column else ANSWER_COLUMNS)
    data = read_source(field, config.path, config.split, config.subset, texts=texts)
    if (other := config.held_out_split) is None:
        return data, None
    if expanded(other).is_file():
        held_out = read_source(f"--data {other}", other, texts=texts)
    else:
        held_out = read_source(field, config.path, other, config.subset, flag, texts)
    if held_out.fingerprint == data.fingerprint or (data.split is not None and held_out.split == data.split):
        raise ConfigError(
            "these rows are trained on",
            field=f"{flag} {other}",
            got=f"the rows of {field}{_named(None, data.split)}",
            wanted="rows that are only evaluated",
            fix="name another split or file, or use --data.held_out N",
        )
    return data, held_out


def read_source(
    field: str,
    name: str,
    split: str | None = None,
    subset: str | None = None,
    split_flag: str = "--data.split",
    texts: Sequence[Sequence[str]] = (),
) -> Data:
    """Return one data set: a file, a folder, or a name on the hub. `field` and `split_flag` are for messages.

    Of each of the `texts`, the first column that a CSV file has is read as text.

    Raise a ConfigError if it does not exist, can't be read, or has no rows.
    """
    path = expanded(name)
    if not name.strip():
        raise ConfigError(field=field, got="an empty name", wanted=f"{KINDS}, a folder, or a name on the hub")
    try:
        if path.is_file():
            for flag, value in ((split_flag, None if split == "train" else split), ("--data.subset", subset)):
                if value is not None:
                    what, fix = "a file has no splits and no subsets", f"omit {flag}, or name a file"
                    raise ConfigError(what, field=f"{flag} {value}", got=str(path), fix=fix)
            data = _file(field, path, texts)
        elif path.is_dir():
            data = _folder(field, path, split, subset, split_flag, texts)
        else:
            data = _hub(field, name, split, subset, split_flag)
    except OSError as error:
        raise ConfigError("cannot be read", field=field, got=error.strerror or _first_line(error)) from None
    if not len(data.rows):
        raise ConfigError(field=field, got="no rows", wanted="one row or more")
    return data


def _file(field: str, path: Path, texts: Sequence[Sequence[str]]) -> Data:
    whole, form = path.stat().st_size <= CHECKED_WHOLE, FORMATS.get(_ending(path))
    if form in ("JSON", "CSV"):
        rows = _rows(field, form, {"": path}, texts, whole=whole)
    elif form is not None:
        options = {"path": form, "data_files": str(path.absolute()), "split": "train"}
        rows = _table_rows(field, _load(field, lambda library: library.load_dataset(**options), path))
    else:
        got = f"the ending {path.suffix}" if path.suffix else "a name without an ending"
        raise ConfigError("not a kind of file that can be read", field=field, got=got, wanted=KINDS, fix="convert it")
    return Data(str(path), rows, whole, _hash_files([path]))


def _folder(
    field: str, path: Path, split: str | None, subset: str | None, split_flag: str, texts: Sequence[Sequence[str]]
) -> Data:
    saved = any((path / name).is_file() for name in SAVED)
    shown = (each for each in sorted(path.rglob("*")) if not re.search(r"(^|/)\.", str(each.relative_to(path))))
    files = [each for each in shown if each.is_file()]
    if saved:
        files = [each for each in files if not each.name.startswith("cache-")]  # which `datasets` keeps there
    else:
        files = [each for each in files if _ending(each) in FORMATS] or files
    if not files:
        raise ConfigError(field=field, got="an empty folder", wanted=f"{KINDS} in it")
    whole, source = sum(each.stat().st_size for each in files) <= CHECKED_WHOLE, str(path.absolute())
    card = path / "README.md"  # it may say which files are which split
    cards = card.is_file() and "\nconfigs:" in card.read_text(errors="replace").partition("\n---")[0]

    def splits(library: Any) -> dict[str, dict[str, Path]]:
        """Return the files of each split, by their names in the folder, as its card or `datasets`' rules have it."""
        root = path.resolve()
        if cards or subset:
            config = library.load_dataset_builder(str(root), subset).config
            own = {each.name for each in fields(config)} - {each.name for each in fields(library.BuilderConfig)}
            usual = type(config)()
            if changed := [name for name in sorted(own) if getattr(config, name) != getattr(usual, name)]:
                fix = f"write the files without it, and take it out of {card}"
                raise ConfigError(field=field, got=f"{listed(changed)} in its card", wanted="none", fix=fix)
            named = config.data_files
        else:
            patterns = library.data_files.get_data_patterns(str(root))
            all_of = library.data_files.DataFilesDict.from_patterns(patterns, base_path=str(root))
            data = {split: [name for name in own if _ending(Path(name)) in FORMATS] for split, own in all_of.items()}
            named = {split: own for split, own in data.items() if own} or all_of  # other files lie beside them
        return {str(split): {os.path.relpath(name, root): Path(name) for name in own} for split, own in named.items()}

    digest = _hash_files(files, path)

    if saved:
        found = _load(field, lambda library: library.load_from_disk(source), path)
        table, part = _split_of(field, found, split, split_flag)
        rows = _table_rows(field, table)
    else:
        chosen, part = _split_of(field, _load(field, splits, path), split, split_flag)
        forms = sorted({FORMATS.get(_ending(each)) or each.suffix for each in chosen.values()})
        if len(forms) > 1:
            got, fix = f"{' and '.join(forms)}: {listed(chosen, 4)}", "move what has no rows out of the folder"
            raise ConfigError(field=field, got=got, wanted="files of one kind", fix=f"{fix}, or convert some")
        elsewhere = [each for name, each in chosen.items() if path / name not in files and each.is_file()]
        digest += _hash_files(elsewhere) if elsewhere else ""
        if forms[0] in ("JSON", "CSV"):
            rows = _rows(field, forms[0], chosen, texts, whole=whole)
        else:
            found = _load(field, lambda library: library.load_dataset(source, subset), path)
            rows = _table_rows(field, _split_of(field, found, split, split_flag)[0])
    return Data(f"{path}{_named(subset, split)}", rows, whole, f"{digest}-{split or ''}", part)


def _hub(field: str, name: str, split: str | None, subset: str | None, split_flag: str) -> Data:
    path = expanded(name)
    if path.suffix in FORMATS or name.startswith((".", "~")) or name.count("/") > 1:
        folder = path.parent if path.parent.is_dir() else Path()
        near = nearest(path.name, (each.name for each in folder.iterdir()), OF_FILES)
        fix = f"did you mean {folder / near}?" if near else f"correct the path; it is relative to {Path.cwd()}"
        wanted = f"{KINDS}, a folder, or a name on the hub"
        raise ConfigError("no such file or folder", field=field, wanted=wanted, fix=fix)
    found = _load(field, lambda library: library.load_dataset(name, subset), None)
    table, part = _split_of(field, found, split, split_flag)
    sources = sorted(getattr(table.info, "download_checksums", None) or {})  # addresses with the commit that was read
    digest = hashlib.sha256("\n".join(sources).encode()).hexdigest() if sources else str(table._fingerprint)
    whole = (table.info.dataset_size or table.data.nbytes) <= CHECKED_WHOLE
    return Data(f"{name}{_named(subset, split)}", _table_rows(field, table), whole, f"{digest}-{split or ''}", part)


def _ending(path: Path) -> str:
    """Return the ending of a file that says what it has, such as .jsonl of rows.jsonl.gz."""
    ends = path.suffixes[-2:]
    return ends[0] if len(ends) == 2 and ends[1] in COMPRESSED else path.suffix


def _hash_files(files: Sequence[Path], root: Path | None = None) -> str:
    """Return a hash of files' contents, and of their names below a folder."""
    digest = hashlib.sha256()
    for path in files:
        if root is not None:
            digest.update(f"{path.relative_to(root)}\n".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _table_rows(field: str, table: Any) -> Rows:
    return Rows(field, [Part("", "row", table, range(len(table)))], table.column_names)


# ---------------------------------------------------------------- JSON and CSV


def _rows(field: str, form: str, files: Mapping[str, Path], texts: Sequence[Sequence[str]], *, whole: bool) -> Rows:
    """Return the rows of files, by their names in a folder; raise ConfigError for one that is no JSON object.

    All of them, or the first ones, are checked.
    """
    places = {name: f"{field}/{name}" if name else field for name in files}
    if form == "CSV":
        return _csv_rows(field, {name: _cells(places[name], path) for name, path in files.items()}, texts)
    parts = [_json_part(places[name], name, path) for name, path in files.items()]
    rows, columns = Rows(field, parts), dict[str, None]()
    try:
        for number in range(len(rows) if whole else min(len(rows), SAMPLED_ROWS)):
            columns |= dict.fromkeys(rows[number])
    except UnusableRow as error:
        raise ConfigError.of(error.problems) from None
    return Rows(field, parts, list(columns))


def _csv_rows(field: str, tables: Mapping[str, dict[str, list[Any]]], texts: Sequence[Sequence[str]]) -> Rows:
    """Return the rows of the columns of CSV files. An empty cell is None.

    A column whose cells are numbers in all files has numbers, and one of true and false has these; but of each of the
    `texts`, the first column that there is stays as it is written: 02108 is no number.
    """
    columns = list(dict.fromkeys(name for own in tables.values() for name in own))
    kept = {_chosen("", None, names, columns) for names in texts}
    for column in columns:
        cells = [own[column] for own in tables.values() if column in own]
        there = [cell for own in cells for cell in own if cell]
        read: Callable[[str], Any] = str
        if column not in kept and all(map(NUMBER.fullmatch, there)):
            read = _number
        elif column not in kept and all(cell.lower() in WORDS for cell in there):
            read = _truth
        for own in cells:
            own[:] = [read(cell) if cell else None for cell in own]
    found = {
        name: [dict(zip(own, row, strict=True)) for row in zip(*own.values(), strict=True)]
        for name, own in tables.items()
    }
    return Rows(field, [Part(name, "row", own, range(len(own))) for name, own in found.items()], columns)


def _number(cell: str) -> int | float:
    return float(cell) if set(cell) & set(".eE") else int(cell)


def _truth(cell: str) -> bool:
    return WORDS[cell.lower()]


def _cells(field: str, path: Path) -> dict[str, list[Any]]:
    """Return the text of all cells of a CSV file, by column; raise ConfigError for a row longer than the header."""
    content, begin, last, rows = _content(field, path), 1, 1, list[list[str]]()
    csv.field_size_limit(sys.maxsize)  # a cell of any size
    try:
        lines = chain(io.StringIO(content.decode(), newline=""), [END])
        reader = csv.reader(lines, delimiter="\t" if _ending(path) == ".tsv" else ",")
        for cells in reader:
            if cells == [END]:
                break
            if rows and len(cells) > len(rows[0]):
                raise ConfigError(
                    field=f"{field}, line {begin}",
                    got=f"{len(cells)} fields",
                    wanted=f"{len(rows[0])}, as in the header",
                    fix="name each column in the header; put a cell that has the separator in quotes",
                )
            last, begin = begin, reader.line_num + 1
            of_blanks = len(cells) == 1 and not cells[0].strip() and (not rows or len(rows[0]) > 1)
            if cells and not of_blanks:
                rows.append(cells)
        else:
            fix = "close the quotes; within them, write a quote twice"
            raise ConfigError("a quote is open", field=f"{field}, line {last}", wanted="its end", fix=fix)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        field, fix = f"{field}, line {line}", "save the file as UTF-8"
        raise ConfigError("cannot be read", field=field, got=_first_line(error), fix=fix) from None
    header = [name or f"Unnamed: {place}" for place, name in enumerate(rows[0] if rows else ())]
    if len({*header}) < len(header):
        got, fix = f"the columns {listed(header)}", "rename or remove one"
        raise ConfigError(field=f"{field}, header", got=got, wanted="different names", fix=fix)
    return {name: [row[n] if n < len(row) else "" for row in rows[1:]] for n, name in enumerate(header)}


def _content(field: str, path: Path) -> bytes:
    """Return what a file has, decompressed, without the mark that some programs put before UTF-8."""
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    try:
        with path.open("rb") as raw, cast("Any", compr)[infer_compression(str(path))](raw, mode="rb") as file:
            return file.read().removeprefix(b"\xef\xbb\xbf")
    except Exception as error:  # each compression has its own errors
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        fix = "compress it again, or decompress it"
        raise ConfigError("cannot be decompressed", field=field, got=_first_line(error), fix=fix) from None


def _json_part(field: str, name: str, path: Path) -> Part:
    """Return the lines of JSON Lines, the objects of a JSON array, or those of the one list in `{"data": [{…}, …]}`."""
    content = _content(field, path)
    begin, objects = content.lstrip()[:1], None
    if _ending(path) == ".json" and begin in (b"[", b"{"):
        try:
            objects = _decode(content)
        except (ValueError, RecursionError) as error:
            if begin == b"[":
                place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
                why = f"not JSON: {_first_line(error)}"
                raise ConfigError(why, field=f"{field}{place}", wanted="a JSON array of objects") from None
        if isinstance(objects, dict):
            lists = [each for each in objects.values() if isinstance(each, list) and each and isinstance(each[0], dict)]
            objects = lists[0] if len(lists) == 1 else None
    if objects is not None:
        return Part(name, "row", objects, range(len(objects)))
    lines = content.split(b"\n")
    return Part(name, "line", lines, [number for number, line in enumerate(lines) if line.strip()])


def _decode(text: bytes) -> Any:
    """Return what JSON says. Raise RecursionError if it is nested too deeply, ValueError if it is not JSON, not UTF-8,
    or has half a surrogate pair, which can't be written again."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        found = json.loads(text.decode(), strict=False)  # NaN, and raw tabs in strings, as other tools write them
        json.dumps(found, ensure_ascii=False).encode()
        return found


# ---------------------------------------------------------------- the library `datasets`


def _load(field: str, load: Callable[[Any], Any], path: Path | None) -> Any:
    """Return what a function of `datasets` loads; a ConfigError has the library's message."""
    if path is not None and any(mark in str(path.absolute()) for mark in MARKS):
        raise ConfigError(
            field=field,
            got=f"a path with one of {' '.join(MARKS)}",
            wanted="a path that the library datasets does not read as a pattern or a URL",
            fix="rename it, or make a link with another name",
        )
    log.info("reading %s", field.removeprefix("--data "))
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        return load(datasets)
    except ConfigError:
        raise
    except Exception as error:  # of pandas, Arrow, the hub client: most of them share only `Exception`
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 10:
            chain.append(cause)
        fix = (
            "correct the name or --data.subset; set HF_TOKEN if it is private or gated; without a network, or with "
            "HF_HUB_OFFLINE, name a file or folder"
        )
        if path is not None:  # the innermost error says what is wrong with the file
            error, fix = next((each for each in reversed(chain) if str(each)), error), "check the file's format"
        raise ConfigError("cannot be read", field=field, got=_first_line(error), fix=fix) from chain[0]


def _split_of(field: str, found: Any, split: str | None, flag: str) -> tuple[Any, str | None]:
    """Return one split of what `datasets` has loaded, and its name; None if there are no splits."""
    if not isinstance(found, Mapping):  # saved by Dataset.save_to_disk
        if split in (None, "train"):
            return found, None
        raise ConfigError(
            "a data set without splits", field=f"{flag} {split}", got=field.removeprefix("--data "), fix=f"omit {flag}"
        )
    names = list(found)
    chosen = split or ("train" if "train" in names or len(names) > 1 else names[0])
    if chosen in names:
        return found[chosen], chosen
    near = nearest(chosen, names) or names[0]
    what, subject = ("no such split", f"{flag} {split}") if split else ("no split is named", flag)
    raise ConfigError(what, field=subject, wanted=f"one of {listed(names)}", fix=f"for example {flag} {listed([near])}")


def _named(subset: str | None, split: str | None) -> str:
    return "".join(f", {kind} {value}" for kind, value in (("subset", subset), ("split", split)) if value)


def listed(names: Iterable[str], most: int = 20) -> str:
    """Return foreign names for a message: not too many, and printable."""
    names = list(names)
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(printable(name, 80) for name in names[:most]) + more


def shown(value: object) -> str:
    """Return the beginning of a foreign value, and its type, for a message."""
    return f"{printable(repr(value), 60)} ({type(value).__name__})"


def _first_line(error: BaseException) -> str:
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0], 300)


PROMPT_COLUMNS: Final = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS: Final = ("answer", "solution", "label")

Prompt = str | list[Message]


@dataclass(frozen=True)
class Columns:
    """Which columns are used."""

    prompt: str | None  # None if there is a template, or if a row is a task without a prompt
    template: str | None  # text with columns in braces; None if there is a column
    answer: str | None  # column of the right answer, if there is one
    as_messages: bool  # prompts are messages in the data set
    has_answers: bool = True  # the column of the answer has nothing else

    @classmethod
    def of(cls, config: DataConfig, data: Data, *, prompts: bool = True, answers: bool = True) -> Columns:
        """Return the columns that the settings name, or the first ones that exist of the usual names.

        Raise a ConfigError if there is none. Without `prompts` a row is a task, and needs no prompt. Without `answers`
        no reward compares with the right one: a column of a usual name that no option names may have anything.
        """
        there, answers = data.rows.columns, answers or config.answer_column is not None
        answer = _chosen("--data.answer_column", config.answer_column, ANSWER_COLUMNS, there)
        if not prompts:
            return cls(None, None, answer, as_messages=False, has_answers=answers)
        if (template := config.prompt_template) is not None:
            for name in _names_in(template):
                _chosen("--data.prompt_template", name, (), there)
            return cls(None, template, answer, as_messages=False, has_answers=answers)
        prompt = _chosen("--data.prompt_column", config.prompt_column, PROMPT_COLUMNS, there)
        if prompt is None:
            raise ConfigError(
                field="--data.prompt_column",
                got=f"the columns {listed(there)} in {data.name}",
                wanted=f"one of {', '.join(PROMPT_COLUMNS)}",
                fix="name the column with the prompt, or write --data.prompt_template",
            )
        first = next((value for n in data.checked() if (value := data.rows[n][prompt]) is not None), None)
        return cls(prompt, None, answer, isinstance(first, list), answers)

    def prompt_of(self, row: Row) -> Prompt:
        """Return a row's prompt. An answer of the assistant at its end is left out.

        Raise UnusableRow, whose field is the column, if there is none, or one of another kind than the others.
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
        """Return a row's right answer as text; None if it has none, or an empty one. Other values are an UnusableRow.

        Of a solution whose last line is `#### X`, or ends in `#### 18`, a number, it is what stands after the hashes.
        """
        if self.answer is None or (value := row.get(self.answer)) is None:
            return None
        if not isinstance(value, str | int | float):
            if not self.has_answers:
                return None
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
