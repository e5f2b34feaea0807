"""The queue on disk: a SQLite file with a write-ahead log that survives `kill -9` at any moment.

Changes are noted while the event loop runs and written by one thread, everything that has gathered in one
transaction: the more clients wait, the more a commit carries. Answers are sent after `commit` returns.
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from environments.api import wire
from environments.api.errors import StoreError
from environments.api.queue import Run
from grpo_common.formats import check_sqlite
from grpo_common.locks import HeldError, hold

log = logging.getLogger("rollout-api")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (kind TEXT NOT NULL, id NOT NULL, body BLOB NOT NULL, PRIMARY KEY (kind, id));
CREATE TABLE IF NOT EXISTS payloads (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
"""
MEMORY_BYTES = 1 << 30
"""Bytes of groups in memory, if the disk may have the others."""
_PUT, _DROP = "REPLACE INTO payloads VALUES (?, ?)", "DELETE FROM payloads WHERE id = ?"
_encode = msgspec.msgpack.encode
R = TypeVar("R")
Change = tuple[str, Sequence[object]]
Call = tuple["asyncio.Future[Any] | None", Sequence[Change], Sequence[int]]
"""Who waits (None: the thread ends), what is written first, and the groups that are read then."""


class Table(dict[Any, R]):
    """The records of one kind by key, written through: those that are set or deleted are put or deleted elsewhere."""

    def __init__(self, known: dict[Any, R], put: Callable[[Any, R], None], delete: Callable[[Any], None]) -> None:
        super().__init__(known)
        self._put, self._delete = put, delete

    def __setitem__(self, key: Any, record: R) -> None:
        super().__setitem__(key, record)
        self._put(key, record)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._delete(key)

    def pop(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        record = self[key]
        del self[key]
        return record

    def clear(self) -> None:
        for key in list(self):
            del self[key]


class Store:
    """The queue's records and the groups' bytes in one file, on which one thread works, in the order of the calls.

    Without a path it is a file without a name, which is gone when the process ends, however it ends. It then keeps
    groups' bytes only.
    """

    def __init__(self, path: Path | None, fsync: bool = False) -> None:
        """Open or create; `fsync` also survives a power cut, at the price of a disk flush per commit.

        Raise StoreError if it is in use by another process, damaged, not ours, or read-only; and FormatError if a newer
        version wrote it: it is as it was.
        """
        self.path = path
        self._noted: list[Change] = []
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._is_closed = False
        if path is None:
            self._writer = sqlite3.connect("", check_same_thread=False, isolation_level=None)
            self._writer.execute("PRAGMA journal_mode = MEMORY")  # a full disk must not keep rows from being deleted
            self._writer.executescript(_SCHEMA)
            return
        try:
            check_sqlite(path, wire.STORE_FORMAT)
            self._lock = _lock(path)
            path.touch(mode=0o600)  # what models say is its owner's; SQLite gives its other files the same mode
            self._writer = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            if (tables := _tables(self._writer)) and "payloads" not in tables:
                raise sqlite3.DatabaseError("the database of another program")
            self._writer.execute("PRAGMA journal_mode = WAL")
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
            _prepare(self._writer)
            self._file = _identity(path)
        except (sqlite3.Error, OSError, msgspec.DecodeError) as error:
            raise self.damaged(error) from error

    @property
    def _field(self) -> str:
        return f"--store {self.path}" if self.path else "file of the groups that a trainer holds"

    def damaged(self, reason: object) -> StoreError:
        """Return the error that what is written can't be read."""
        if self.path is None:
            return StoreError("cannot be read", field=self._field, got=reason, fix="use --store")
        return StoreError(
            field=self._field,
            got=reason,
            wanted="a writable file of this program's own, whole",
            fix="restore it from a copy, or move it away: the groups in it are lost then, checkpoints are not",
        )

    def table(self, kind: str, record: type[R]) -> dict[Any, R]:
        """Return the records of a kind: those with numbers by number, others in the order in which they were put."""
        if self.path is None:
            return {}
        order = "CASE typeof(id) WHEN 'integer' THEN id END, rowid"
        try:
            rows = self._writer.execute(f"SELECT id, body FROM items WHERE kind = ? ORDER BY {order}", (kind,))
            known = {key: msgspec.msgpack.decode(body, type=record) for key, body in rows}
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise self.damaged(error) from error

        def put(key: Any, record: R) -> None:
            self.note("REPLACE INTO items VALUES (?, ?, ?)", kind, key, _encode(record))

        def delete(key: Any) -> None:
            self.note("DELETE FROM items WHERE kind = ? AND id = ?", kind, key)

        return Table(known, put, delete)

    def note(self, sql: str, *values: object) -> None:
        """Note a statement for the next transaction."""
        self._noted.append((sql, values))

    async def commit(self) -> None:
        """Return when everything noted so far is written. After a StoreError a store with a path is unusable."""
        if self._noted or self.path is not None:
            await self._call()

    async def read(self, ids: Sequence[int]) -> dict[int, bytes]:
        """Return the bytes of groups, also of those that are noted. Raises StoreError."""
        found = await self._call(ids)
        if lost := [each for each, row in found.items() if row is None]:
            raise StoreError("the bytes of groups are missing", field=self._field, got=lost, fix="was the file edited?")
        return {each: row[0] for each, row in found.items()}

    def close(self) -> None:
        """Write what is noted, and let the file go."""
        self._is_closed = True
        self._hand_over(None)
        self._thread.join()
        if self.path is not None:
            os.close(self._lock)

    async def _call(self, ids: Sequence[int] = ()) -> dict[int, Any]:
        """Have the thread write what is noted, and return the rows of groups."""
        if self._is_closed:
            raise StoreError(field=self._field, got="a store that is closed")
        done = asyncio.get_running_loop().create_future()
        self._hand_over(done, ids)
        return await done

    def _hand_over(self, done: "asyncio.Future[Any] | None", ids: Sequence[int] = ()) -> None:
        """Give the thread what is noted; in one piece, so that no transaction holds half a change."""
        if self._thread.ident is None:
            self._thread.start()
        self._calls.put((done, self._noted, ids))
        self._noted = []

    def _work(self) -> None:
        """The thread: everything that has gathered is one transaction, and none follows one that failed.

        Without a path the changes of each call are a transaction: one that fails says nothing of the others.
        """
        problem: StoreError | None = None
        while True:
            calls = [self._calls.get()]
            while self.path is not None and not self._calls.empty():
                calls.append(self._calls.get())
            failed = problem or self._write([change for _, noted, _ in calls for change in noted])
            problem = None if self.path is None else failed
            for done, _, ids in calls:
                if done is None:
                    self._writer.close()
                    return
                answer: Any = failed
                if failed is None:
                    try:
                        query = "SELECT body FROM payloads WHERE id = ?"
                        answer = {each: self._writer.execute(query, (each,)).fetchone() for each in ids}
                    except Exception as error:  # also without memory: the next calls wait for this thread
                        answer = self.damaged(error)
                with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                    done.get_loop().call_soon_threadsafe(_settle, done, answer)

    def _write(self, changes: Sequence[Change]) -> StoreError | None:
        if self.path is not None and _identity(self.path) != self._file:  # SQLite would write into the nameless file
            return StoreError(
                "deleted, or replaced, while in use",
                field=self._field,
                got="another file" if self.path.exists() else "no such file",
                wanted="the file that was opened",
                fix="start the rollout API again; the groups that were queued are lost",
            )
        try:
            if changes:
                with self._writer:
                    self._writer.execute("BEGIN IMMEDIATE")
                    for sql, values in changes:
                        self._writer.execute(sql, values)
        except Exception as error:  # as for a read
            return StoreError("cannot be written", field=self._field, got=error)
        return None


def _settle(done: "asyncio.Future[Any]", answer: Any) -> None:
    if done.cancelled():
        return
    if isinstance(answer, StoreError):
        done.set_exception(answer)
    else:
        done.set_result(answer)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file a path names now; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _lock(path: Path) -> int:
    """Hold the store for this process; the kernel lets go when it ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return hold(Path(f"{path}.lock"))
    except HeldError as held:
        fix = "stop it or give another file"
        raise StoreError("in use", field=f"--store {path}", got=f"process {held.holder}", fix=fix) from None
    except OSError as error:
        raise StoreError(field=f"--store {path}", got=error.strerror, wanted="a writable place") from error


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _prepare(db: sqlite3.Connection) -> None:
    """Make the tables; move what is in those of format 1 (a table for each kind), all in one transaction."""
    db.execute("BEGIN IMMEDIATE")  # refuses a read-only file
    if db.execute("PRAGMA user_version").fetchone() == (wire.STORE_FORMAT,):
        db.execute("ROLLBACK")  # nothing is written: the file may be damaged
        return
    former = _tables(db)
    for statement in _SCHEMA.split(";"):
        db.execute(statement)
    if "groups" in former:
        (last,) = db.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'groups'").fetchone()
        for key, body in db.execute("SELECT id, body FROM run").fetchall():
            run = msgspec.structs.replace(msgspec.msgpack.decode(body, type=Run), next_group=(last or 0) + 1)
            db.execute("INSERT INTO items VALUES ('run', ?, ?)", (key, _encode(run)))
        db.execute("INSERT INTO items SELECT 'environment', id, body FROM environments")
        db.execute("INSERT INTO items SELECT iif(place = 'buffer', 'buffered', 'group'), id, body FROM groups")
        db.execute("INSERT INTO items SELECT 'lease', batch_id, body FROM leases")
        db.execute("INSERT INTO items SELECT 'closed', batch_id, body FROM closed ORDER BY number")
        for table, kinds in (("posts", ("post", "unkeyed")), ("unanswered", ("unanswered",))):
            rows = db.execute(f"SELECT * FROM {table} ORDER BY 2").fetchall() if table in former else ()
            for kind in kinds:
                db.executemany("INSERT INTO items VALUES (?, ?, ?)", [(kind, key, _encode(when)) for key, when in rows])
        for table in former & {"run", "environments", "groups", "leases", "closed", "posts", "unanswered"}:
            db.execute(f"DROP TABLE {table}")
    db.execute(f"PRAGMA user_version = {wire.STORE_FORMAT}")
    db.execute("COMMIT")


class Payloads:
    """The groups' bytes by id: in memory, and beyond a limit on disk alone.

    The oldest groups are trained first, so it is the newest that are left in the store alone when memory is full.
    In a store without a path, those that wait are all in memory (`--max-queued-mb` limits them), and those that a
    trainer holds move to its file when memory is full. `known` groups are in the store already.
    """

    def __init__(self, store: Store, known: Iterable[int] = ()) -> None:
        self.in_memory = 0
        self._store = store
        self._is_durable = store.path is not None
        self._is_full = False
        self._bodies: dict[int, bytes | None] = dict.fromkeys(known)  # None: on disk alone

    def put(self, group_id: int, body: bytes) -> None:
        """Keep a group's bytes; durably once the store has committed."""
        fits = not self._is_durable or self.in_memory + len(body) <= MEMORY_BYTES
        self._bodies[group_id] = body if fits else None
        self.in_memory += len(body) if fits else 0
        if self._is_durable:
            self._store.note(_PUT, group_id, body)

    async def get(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of these groups, in this order. Raises StoreError: they cannot be read."""
        found = {each: self._bodies[each] for each in ids}
        if from_disk := [each for each, body in found.items() if body is None]:
            found |= await self._store.read(from_disk)
        return [body for body in found.values() if body is not None]

    async def leave(self, ids: Iterable[int]) -> None:
        """Keep these groups on disk alone: a trainer has them, and they come again only if it is killed.

        In a store without a path, what fits into memory stays there, and so does what the disk does not take.
        """
        for each in ids:
            body = self._bodies.get(each)
            if body is None or not (self._is_durable or self.in_memory > MEMORY_BYTES):
                continue
            if not self._is_durable:
                self._store.note(_PUT, each, body)
                try:
                    await self._store.commit()
                except StoreError as error:
                    if not self._is_full:
                        message = "groups that the trainer holds stay in memory (%s); --store names a place"
                        log.warning(message, error.got)
                    self._is_full = True
                    return
                if each not in self._bodies:  # trained, or forgotten by a reset, while it was written
                    self._store.note(_DROP, each)
            if self._bodies.get(each) is not None:
                self._bodies[each] = None
                self.in_memory -= len(body)

    def drop(self, ids: Iterable[int]) -> None:
        for each in list(ids):
            body = self._bodies.pop(each, b"")
            self.in_memory -= len(body or b"")
            if self._is_durable or body is None:
                self._store.note(_DROP, each)

    def clear(self) -> None:
        self.drop(self._bodies)
