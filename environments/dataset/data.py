"""Read a data set: a file, a folder, or a name on the hub.

JSON is read here, compressed or not, and everything else by the library `datasets`, which caches it in Arrow files
outside the user's folder. `datasets` turns JSON text such as "2024-01-01" into a timestamp, and its errors name no
line. It still says which files of a folder are which split.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Final, Protocol, cast

import msgspec

from environments.config import ConfigError, UnusableRow
from environments.data_config import DataConfig
from grpo_common.http import raise_open_files
from grpo_common.suggest import OF_FILES, nearest

log = logging.getLogger(__name__)

CHECKED_WHOLE: Final = 200 << 20
"""Bytes of files up to which every row is checked before the start."""
SAMPLED_ROWS: Final = 1000
"""Rows of larger data that are checked before the start, and that tell which columns there are."""
JSON_ENDS: Final = (".jsonl", ".ndjson", ".json")
TABLE_ENDS: Final = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
COMPRESSED: Final = (".gz", ".zst", ".bz2", ".xz")
KINDS: Final = "a .jsonl, .json, .csv, .tsv or .parquet file"
BOM: Final = b"\xef\xbb\xbf"
UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")
TOO_DEEP: Final = "nested too deeply"
CHUNK: Final = 1 << 20
"""Bytes that are read at once to count lines."""
MARKS: Final = re.compile(r"[*?\[\]]|::")
"""What `datasets` and fsspec read in a path as a pattern, or as a URL in a URL."""
HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")

Row = dict[str, Any]


class Rows(Protocol):
    """The rows of a data set, by number from 0."""

    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row: ...

    def place(self, number: int) -> str:
        """Return where a row is, for messages: a line of a file, or a row counted from 1."""
        ...


@dataclass(frozen=True)
class Data:
    """A data set that was opened.

    Attributes:
        name: As messages call it.
        whole: It is small enough to check every row before the start.
        fingerprint: Changes if the content does.
        split: Its split, also if the settings name none; None: it has no splits.
    """

    name: str
    rows: Rows
    whole: bool
    fingerprint: str
    split: str | None = None

    def checked(self) -> range:
        """Return the numbers of the rows to check before the start."""
        return range(len(self.rows) if self.whole else min(len(self.rows), SAMPLED_ROWS))


def read_data(config: DataConfig) -> tuple[Data, Data | None]:
    """Return the data set of the settings, and that of `held_out_split` if it is set.

    Raises:
        ConfigError: It does not exist, can't be read, or has no rows.
    """
    assert config.path is not None, "the environment asks for --data first"
    data = _read(config.path, config.split, config.subset, "--data.split")
    if (other := config.held_out_split) is None:
        return data, None
    flag = "--data.held_out_split"
    if Path(other).expanduser().is_file():
        held_out = _read(other, None, None, flag)
    else:
        held_out = _read(config.path, other, config.subset, flag)
    if held_out.fingerprint == data.fingerprint or (data.split is not None and held_out.split == data.split):
        raise ConfigError(
            "these rows are trained on",
            field=f"{flag} {other}",
            got=f"the rows of --data {config.path}{_named(None, data.split)}",
            wanted="rows that are only evaluated",
            fix="name another split or file, or use --data.held_out N",
        )
    return data, held_out


def _read(name: str, split: str | None, subset: str | None, split_flag: str) -> Data:
    path = Path(name).expanduser()
    field = f"--data {name}"
    try:
        if path.is_dir():
            data = _folder(field, path, split, subset, split_flag)
        elif path.exists():
            data = _file(field, path, split, subset, split_flag)
        else:
            _refuse_missing(field, name, path)
            data = _hub(field, name, split, subset, split_flag)
    except OSError as error:
        raise ConfigError("cannot be read", field=field, got=error.strerror or _first_line(error)) from None
    if not len(data.rows):
        raise ConfigError(field=field, got="no rows", wanted="one row or more")
    return data


def _refuse_missing(field: str, name: str, path: Path) -> None:
    """Refuse a name that can only be a path: nothing is there."""
    if HUB_NAME.fullmatch(name) and not name.startswith((".", "~")) and path.suffix not in (*JSON_ENDS, *TABLE_ENDS):
        return
    folder = path.parent if path.parent.is_dir() else Path()
    near = nearest(path.name, (each.name for each in folder.iterdir()), OF_FILES)
    fix = f"did you mean {folder / near}?" if near else f"correct the path; it is relative to {Path.cwd()}"
    raise ConfigError("no such file or folder", field=field, wanted=f"{KINDS}, a folder, or a name on the hub", fix=fix)


# ---------------------------------------------------------------- files


def _file(field: str, path: Path, split: str | None, subset: str | None, split_flag: str) -> Data:
    for flag, value in ((split_flag, None if split == "train" else split), ("--data.subset", subset)):
        if value is not None:
            raise ConfigError(
                "a file has no splits and no subsets",
                field=f"{flag} {value}",
                got=str(path),
                fix=f"omit {flag}" + (", or name a file" if flag == "--data.held_out_split" else ""),
            )
    size = path.stat().st_size
    if not size:
        raise ConfigError(field=field, got="an empty file", wanted="one row or more")
    kind = _kind(path)
    rows: Rows
    if kind in JSON_ENDS:
        rows = _json_rows(field, path, whole=size <= CHECKED_WHOLE)
    else:
        builder, end = TABLE_ENDS.get(kind), path.suffix
        if builder is None:
            raise ConfigError(
                "not a kind of file that can be read",
                field=field,
                got=f"the ending {end}" if end else "a name without an ending",
                wanted=KINDS,
                fix="rename or convert it",
            )
        rows = _Table(_load(field, lambda library: library.load_dataset(builder, **_csv(kind), **_only(path)), path))
    return Data(str(path), rows, size <= CHECKED_WHOLE, _hash_files([path]))


def _kind(path: Path) -> str:
    """Return the ending of a file that says what it has, such as .jsonl of rows.jsonl.gz."""
    ends = path.suffixes[-2:]
    return ends[0] if len(ends) == 2 and ends[1] in COMPRESSED else path.suffix


def _csv(kind: str) -> dict[str, Any]:
    """Return options of pandas: an empty cell is None, and NA or null are text as they are in any other file."""
    options = {"keep_default_na": False, "na_values": [""]}
    return options | ({"sep": "\t"} if kind == ".tsv" else {}) if kind in (".csv", ".tsv") else {}


def _only(path: Path) -> dict[str, Any]:
    return {"data_files": str(_plain(path)), "split": "train"}


def _plain(path: Path) -> Path:
    """Return an absolute path as fsspec and `datasets` take it: a link, if they would read it as a pattern or a URL."""
    path = path.absolute()
    if not MARKS.search(str(path)):
        return path
    ends = "".join(end for end in path.suffixes[-2:] if not MARKS.search(end))
    link = _links(path).with_suffix(ends)
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        link.symlink_to(path)
    return link


def _plain_folder(folder: Path, files: Sequence[Path]) -> tuple[Path, dict[str, Path]]:
    """Return a folder as `datasets` takes it, and its files by their paths there.

    If a name in it could be read as a pattern or a URL, it is another folder, with links to the files. A link to the
    folder is not enough: `datasets` follows it.
    """
    names = [str(each.relative_to(folder)) for each in files]
    root = folder.absolute()
    if not MARKS.search(str(root) + "".join(names)):
        return root, {str(root / name): file for name, file in zip(names, files, strict=True)}
    root, found = _links(root), dict[str, Path]()
    shutil.rmtree(root, ignore_errors=True)
    for number, (name, file) in enumerate(zip(names, files, strict=True)):
        link = root / MARKS.sub("_", name)
        link = root / str(number) / link.name if str(link) in found else link
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.absolute())
        found[str(link)] = file
    return root, found


def _links(path: Path) -> Path:
    from datasets import config

    return Path(config.HF_DATASETS_CACHE) / "links" / hashlib.sha256(str(path).encode()).hexdigest()


def _json_rows(field: str, path: Path, *, whole: bool) -> Rows:
    """Return the rows of JSON Lines, or of one JSON array of objects."""
    file = path.open("rb") if path.suffix in JSON_ENDS else _decompressed(field, path)
    start = os.pread(file.fileno(), 4096, 0)
    if start.startswith(UTF_16):
        raise ConfigError(field=field, got="UTF-16", wanted="UTF-8", fix="save it as UTF-8")
    begin = start.removeprefix(BOM).lstrip()[:1]
    if _kind(path) == ".json" and begin in (b"[", b"{"):
        with file:
            content = file.read().removeprefix(BOM)
        if begin == b"[":
            return _Array(field, content)
        if (rows := _one_object(field, content)) is not None:
            return rows
        file = path.open("rb") if path.suffix in JSON_ENDS else _decompressed(field, path)
    return _Lines(field, file, whole=whole)


def _decompressed(field: str, path: Path) -> IO[bytes]:
    """Return a copy without a name, which ends with this process.

    Raises:
        ConfigError: It is not compressed as its ending says, or that compression is not installed.
    """
    import fsspec

    copy = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open
    try:
        with fsspec.open(str(_plain(path)), "rb", compression="infer") as file:
            shutil.copyfileobj(cast("IO[bytes]", file), copy)
    except Exception as error:  # each compression has its own errors; a missing one is a ValueError
        copy.close()
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        fix = "compress it again, or decompress it"
        raise ConfigError("cannot be decompressed", field=field, got=_first_line(error), fix=fix) from None
    copy.flush()
    copy.seek(0)
    return copy


class _Lines:
    """JSON Lines in a file that stays open; blank lines don't count."""

    def __init__(self, field: str, file: IO[bytes], *, whole: bool) -> None:
        """Find the lines, and read those that are checked before the start.

        Raises:
            ConfigError: A line is not a JSON object.
        """
        self._field = field
        self._file = file
        self._opened = self._state()
        self._starts = array("Q")
        at = 0
        for line in self._file:
            skipped = len(BOM) if at == 0 and line.startswith(BOM) else 0
            if line[skipped:].strip():
                self._starts.append(at + skipped)
            at += len(line)
        seen: dict[str, None] = {}
        for number in range(len(self) if whole else min(len(self), SAMPLED_ROWS)):
            try:
                seen |= dict.fromkeys(self._row(number))
            except UnusableRow as error:
                raise ConfigError.of(error.problems) from None
        self.columns = tuple(seen)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Row:
        return dict.fromkeys(self.columns) | self._row(number)

    def place(self, number: int) -> str:
        start, lines = self._starts[number], 1
        for at in range(0, start, CHUNK):
            lines += self._read(at, min(at + CHUNK, start)).count(b"\n")
        return f"line {lines}"

    def _state(self) -> tuple[int, int]:
        """Return the file's size in bytes, and when it was written last, in nanoseconds."""
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _read(self, start: int, stop: int) -> bytes:
        """Return bytes of the file; several threads may read.

        Raises:
            ConfigError: It has changed since it was opened, so that lines may begin elsewhere.
        """
        found = os.pread(self._file.fileno(), stop - start, start)
        if self._state() != self._opened:
            raise ConfigError(
                "the file has changed since the start",
                field=self._field,
                got=f"{self._state()[0]:,} bytes",
                wanted=f"the {self._opened[0]:,} bytes of the start, unchanged",
                fix="restore it and resume the run; prepare new data under another name",
            )
        return found

    def _row(self, number: int) -> Row:
        start, after = self._starts[number], number + 1
        line = self._read(start, self._starts[after] if after < len(self._starts) else self._opened[0])
        try:
            row = _decode(line.rstrip(b"\r\n"))
        except ValueError as error:
            raise self._wrong(number, f"{_short(line)} ({_first_line(error)})", "one JSON object") from None
        if not isinstance(row, dict):
            fix = "put each row on a line, as {…}" if line.strip()[:1] == b"[" else ""
            raise self._wrong(number, _short(line), "one JSON object", fix)
        return row

    def _wrong(self, number: int, got: str, wanted: str, fix: str = "") -> UnusableRow:
        fix = fix or "correct or remove the line"
        return UnusableRow(field=f"{self._field}, {self.place(number)}", got=got, wanted=wanted, fix=fix)


class _Array:
    """The objects of a JSON array, in memory."""

    def __init__(self, field: str, content: bytes, rows: list[Any] | None = None) -> None:
        """Read the whole file's content.

        Raises:
            ConfigError: It is not an array of objects.
        """
        try:
            self._rows: list[Any] = _decode(content) if rows is None else rows
        except ValueError as error:
            found = re.search(r"\(byte (\d+)\)", str(error))
            line = content[: int(found[1])].count(b"\n") + 1 if found else content.count(b"\n") + 1
            raise ConfigError(
                f"not JSON: {_first_line(error)}", field=f"{field}, line {line}", wanted="a JSON array of objects"
            ) from None
        for number, row in enumerate(self._rows):
            if not isinstance(row, dict):
                got = _short(repr(row).encode())
                raise ConfigError(field=f"{field}, {self.place(number)}", got=got, wanted="one JSON object")
        self.columns = tuple(dict.fromkeys(key for row in self._rows for key in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Row:
        return dict.fromkeys(self.columns) | self._rows[number]

    def place(self, number: int) -> str:
        return f"row {number + 1}"


def _one_object(field: str, content: bytes) -> _Array | None:
    """Return the rows of a file such as `{"data": [{…}, …]}`; None if it is something else, such as JSON Lines."""
    try:
        found = _decode(content)
    except ValueError:
        return None
    lists = [value for value in found.values() if isinstance(value, list) and all(isinstance(r, dict) for r in value)]
    return _Array(field, content, lists[0]) if len(lists) == 1 and lists[0] else None


def _decode(text: bytes) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: It is not JSON.
    """
    try:
        return msgspec.json.decode(text)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8; save the file as UTF-8") from None
    except msgspec.DecodeError:
        pass
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    try:
        found = json.loads(text, strict=False)  # NaN, and raw tabs in strings, as other tools write them
        json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg}, (byte {error.pos})") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"half a character, {half!a}: the other half of the surrogate pair is missing") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    return found


class _Joined:
    """The rows of several files, one after another."""

    def __init__(self, names: Sequence[str], parts: Sequence[Rows]) -> None:
        """`names`: of the files, for messages."""
        self._names, self._parts = names, parts
        self._ends = list(accumulate(map(len, parts)))
        self.columns = tuple(dict.fromkeys(column for part in parts for column in part.columns))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Row:
        part, own = self._find(number)
        return dict.fromkeys(self.columns) | self._parts[part][own]

    def place(self, number: int) -> str:
        part, own = self._find(number)
        return f"{self._names[part]}, {self._parts[part].place(own)}"

    def _find(self, number: int) -> tuple[int, int]:
        part = bisect_right(self._ends, number)
        return part, number - (self._ends[part - 1] if part else 0)


def _hash_files(files: Sequence[Path], root: Path | None = None) -> str:
    """Return a hash of files' contents, and of their names below a folder."""
    digest = hashlib.sha256()
    for path in files:
        if root is not None:
            digest.update(f"{path.relative_to(root)}\n".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


# ---------------------------------------------------------------- the library `datasets`


class _Table:
    """Rows of a `datasets.Dataset`, memory-mapped."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.columns = tuple(cast("list[str]", table.column_names))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> Row:
        return cast("Row", self._table[number])

    def place(self, number: int) -> str:
        return f"row {number + 1}"


def _folder(field: str, path: Path, split: str | None, subset: str | None, split_flag: str) -> Data:
    saved = [name for name in ("dataset_dict.json", "state.json") if (path / name).is_file()]
    files = sorted(each for each in path.rglob("*") if each.is_file() and not _beside_data(each, path, bool(saved)))
    if not files:
        raise ConfigError(field=field, got="an empty folder", wanted=f"{KINDS} in it")
    if not saved:
        files = [each for each in files if _kind(each) in (*JSON_ENDS, *TABLE_ENDS)] or files
    size = sum(each.stat().st_size for each in files)
    whole = size <= CHECKED_WHOLE
    rows: Rows
    raise_open_files()  # each file of JSON Lines stays open
    if not (saved or subset or _names_subsets(path)) and all(_kind(each) in JSON_ENDS for each in files):
        splits = _load(field, lambda library: _splits_of_files(library, path, files), path)
        found, part = _split_of(field, splits, split, split_flag)
        names = [str(each.relative_to(path)) for each in found]
        parts = [_json_rows(f"{field}/{name}", each, whole=whole) for name, each in zip(names, found, strict=True)]
        rows = _Joined(names, parts)
    else:

        def load(library: Any) -> Any:
            plain = str(_plain_folder(path, files)[0])
            return library.load_from_disk(plain) if saved else library.load_dataset(plain, subset)

        table, part = _split_of(field, _load(field, load, path), split, split_flag)
        rows = _Table(table)
    fingerprint = f"{_hash_files(files, path)}-{split or ''}"
    return Data(f"{path}{_named(subset, split)}", rows, whole, fingerprint, part)


def _splits_of_files(library: Any, folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return which files of a folder are which split by `datasets`' rules for their names."""
    root, ours = _plain_folder(folder, files)
    patterns = library.data_files.get_data_patterns(str(root))
    found = library.data_files.DataFilesDict.from_patterns(patterns, base_path=str(root))
    splits = {str(split): [ours[name] for name in names if name in ours] for split, names in found.items()}
    return {split: own for split, own in splits.items() if own}


def _names_subsets(folder: Path) -> bool:
    """Return whether a folder's card says which files are which split, which `datasets` reads."""
    try:
        card = (folder / "README.md").read_text(errors="replace")
    except OSError:
        return False
    return card.startswith("---") and re.search(r"^configs:", card.partition("\n---")[0], re.MULTILINE) is not None


def _beside_data(file: Path, folder: Path, saved: bool) -> bool:
    """Return whether a file is hidden, or is a cache that `datasets` keeps beside what it saved."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return hidden or (saved and file.name.startswith("cache-"))


def _hub(field: str, name: str, split: str | None, subset: str | None, split_flag: str) -> Data:
    found = _load(field, lambda library: library.load_dataset(name, subset), None)
    table, part = _split_of(field, found, split, split_flag)
    sources = sorted(getattr(table.info, "download_checksums", None) or {})  # addresses with the commit that was read
    fingerprint = hashlib.sha256("\n".join(sources).encode()).hexdigest() if sources else str(table._fingerprint)
    size = table.info.dataset_size or table.data.nbytes
    fingerprint = f"{fingerprint}-{split or ''}"
    return Data(f"{name}{_named(subset, split)}", _Table(table), size <= CHECKED_WHOLE, fingerprint, part)


def _named(subset: str | None, split: str | None) -> str:
    return "".join(f", {kind} {value}" for kind, value in (("subset", subset), ("split", split)) if value)


def _split_of(field: str, found: Any, split: str | None, flag: str) -> tuple[Any, str | None]:
    """Return one split of what `datasets` has loaded, and its name; None if there are no splits."""
    if not isinstance(found, Mapping):  # saved by Dataset.save_to_disk
        if split not in (None, "train"):
            raise ConfigError(
                field=f"{flag} {split}", got="a data set without splits", wanted="no split", fix=f"omit {flag}"
            )
        return found, None
    names = list(found)
    if split is None:
        if "train" in names or len(names) == 1:
            split = "train" if "train" in names else names[0]
            return found[split], split
        raise ConfigError(
            field=flag, got="no split", wanted=f"one of {listed(names)}", fix=f"add {flag} {listed(names[:1])}"
        )
    if split not in names:
        near = nearest(split, names) or names[0]
        raise ConfigError(
            "no such split",
            field=f"{flag} {split}",
            wanted=f"one of {listed(names)}",
            fix=f"for example {listed([near])}",
        )
    return found[split], split


def _load(field: str, load: Callable[[Any], Any], path: Path | None) -> Any:
    """Return what a function of `datasets` loads.

    Raises:
        ConfigError: It can't be loaded; the message says why, in one line.
    """
    log.info("reading %s", field.removeprefix("--data "))
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        return load(datasets)
    except Exception as error:
        # The library passes on errors of pandas, Arrow, its hub client and its HTTP client, and its own, most of which
        # share only `Exception`.
        raise _explained(field, error, path) from error


def _explained(field: str, error: BaseException, path: Path | None) -> ConfigError:
    """Return why `datasets` could not load something."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 10:
        chain.append(cause)
    text = " ".join(_first_line(each) for each in chain)
    names = {base.__name__ for each in chain for base in type(each).__mro__}  # by name: httpx and httpx2 are in use
    if path is not None:
        if "UnicodeDecodeError" in names and path.is_file():
            field = f"{field}, line {_first_bad_line(path)}"
            return ConfigError(
                field=field, got="bytes that are not UTF-8", wanted="UTF-8", fix="save the file as UTF-8"
            )
        if found := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", text):
            return ConfigError(
                field=f"{field}, line {found[2]}", got=f"{found[3]} cells", wanted=f"{found[1]}, as in the first line",
                fix='put text that contains a comma in "quotes"',
            )  # fmt: skip
        if "corresponds to no data" in text:
            return ConfigError(field=field, got="no rows", wanted="one row or more")
        root = next((each for each in reversed(chain) if str(each)), error)
        return ConfigError("cannot be read", field=field, got=_first_line(root), fix="check the file's format")
    if "GatedRepoError" in names or "gated" in text:
        fix = "accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
        return ConfigError("the data set is gated", field=field, got="no access", wanted="a token with access", fix=fix)
    if found := re.search(r"(?:available configs|Available): \[(.*?)\]", text):
        subsets = listed(found[1].replace("'", "").split(", "))
        return ConfigError(field="--data.subset", got=_subset_of(text), wanted=f"one of {subsets}", fix="name one")
    if "OfflineModeIsEnabled" in names or os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "on", "yes"):
        fix = "unset HF_HUB_OFFLINE, or name a file or folder"
        return ConfigError(
            "not in the cache, and offline mode is on", field=field, wanted="a data set in the cache", fix=fix
        )
    if names & {"DatasetNotFoundError", "RepositoryNotFoundError"}:
        fix = "correct the name, such as openai/gsm8k, or name a file; for a private data set set HF_TOKEN"
        return ConfigError("neither a file here nor a data set on the hub", field=field, got=field[7:], fix=fix)
    if names & {"TransportError", "ConnectionError"}:
        fix = "check the network, or name a file or folder"
        return ConfigError("the hub does not answer", field=field, got=_first_line(error), fix=fix)
    return ConfigError("cannot be loaded", field=field, got=_first_line(error), fix="name a file or folder instead")


def _subset_of(text: str) -> str:
    found = re.search(r"BuilderConfig '(.*?)' not found", text)
    return found[1] if found else "none"


def _first_bad_line(path: Path) -> int:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def listed(names: Iterable[str], most: int = 20) -> str:
    """Return names of a data set for a message: not too many, and with control characters escaped."""
    names = list(names)
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(_short(name.encode()) for name in names[:most]) + more


def _first_line(error: BaseException) -> str:
    """Return an error's first line, short enough for a message."""
    return _short((str(error).strip().splitlines() or [type(error).__name__])[0].encode(), 300)


def _short(text: bytes, most: int = 80) -> str:
    """Return the start of foreign text, with control characters escaped."""
    shown = repr(text[:most].decode(errors="replace").strip())[1:-1]
    return f"{shown}…" if len(text) > most else shown
