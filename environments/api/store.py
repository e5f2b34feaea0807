"""The queue on disk: a SQLite file with a write-ahead log that survives `kill -9` at any moment.

Changes are collected while the event loop runs and written by one thread, everything that has gathered in one
transaction: the more clients wait, the more a commit carries. Answers are sent after `commit` returns.
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
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
_encode = msgspec.msgpack.encode
R = TypeVar("R")
Change = tuple[str, Sequence[object]]


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
    """The queue's records and the groups' bytes in one file."""

    def __init__(self, path: Path, fsync: bool = False) -> None:
        """Open or create; `fsync` also survives a power cut, at the price of a disk flush per commit.

        Raises:
            StoreError: in use by another process, damaged, not ours, or not writable.
            FormatError: a newer version wrote it. It is as it was.
        """
        self.path = path
        self._noted: list[Change] = []
        self._waiting: list[tuple[asyncio.Future[None] | None, list[Change]]] = []
        self._wake = threading.Condition()
        self._closing = False
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
        self._thread = threading.Thread(target=self._write, name="store", daemon=True)
        self._thread.start()

    def damaged(self, reason: object) -> StoreError:
        """Return the error that what is written can't be read."""
        return StoreError(
            field=f"--store {self.path}",
            got=reason,
            wanted="a writable file of this program's own, whole",
            fix="restore it from a copy, or move it away: the groups in it are lost then, checkpoints are not",
        )

    def table(self, kind: str, record: type[R]) -> Table[R]:
        """Return the records of a kind: those with numbers by number, others in the order in which they were put."""
        order = "CASE typeof(id) WHEN 'integer' THEN id END, rowid"
        try:
            rows = self._writer.execute(f"SELECT id, body FROM items WHERE kind = ? ORDER BY {order}", (kind,))
            known = {key: msgspec.msgpack.decode(body, type=record) for key, body in rows}
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise self.damaged(error) from error

        def put(key: Any, record: R) -> None:
            self._noted.append(("REPLACE INTO items VALUES (?, ?, ?)", (kind, key, _encode(record))))

        def delete(key: Any) -> None:
            self._noted.append(("DELETE FROM items WHERE kind = ? AND id = ?", (kind, key)))

        return Table(known, put, delete)

    def put_payload(self, group_id: int, payload: bytes) -> None:
        """Note a group's bytes; they are readable once a `commit` has returned."""
        self._noted.append(("INSERT INTO payloads VALUES (?, ?)", (group_id, payload)))

    def drop_payload(self, group_id: int) -> None:
        """Forget a group's bytes."""
        self._noted.append(("DELETE FROM payloads WHERE id = ?", (group_id,)))

    # Writing

    async def commit(self) -> None:
        """Return when everything noted so far is written.

        Raises:
            StoreError: it could not be written; the store is not usable any more.
        """
        if self._closing:
            raise StoreError(field=f"--store {self.path}", got="a store that is closed")
        done = asyncio.get_running_loop().create_future()
        self._hand_over(done)
        await done

    def read_payloads(self, ids: Iterable[int]) -> dict[int, bytes]:
        """Return the bytes of committed groups. Call it from a separate thread, it may wait for the disk."""
        try:
            with contextlib.closing(sqlite3.connect(self.path)) as reader:
                query = "SELECT body FROM payloads WHERE id = ?"
                found = {each: reader.execute(query, (each,)).fetchone() for each in ids}
        except sqlite3.Error as error:
            raise self.damaged(error) from error
        if lost := [each for each, row in found.items() if row is None]:
            field, fix = f"--store {self.path}", "was the file edited?"
            raise StoreError("the bytes of groups are missing", field=field, got=lost, fix=fix)
        return {each: row[0] for each, row in found.items()}

    def close(self) -> None:
        """Write what is noted, and let the file go."""
        self._hand_over(None)
        self._thread.join()
        os.close(self._lock)

    def _hand_over(self, done: "asyncio.Future[None] | None") -> None:
        """Give the thread what is noted; in one piece, so that no transaction holds half a change. None: it ends."""
        with self._wake:
            self._waiting.append((done, self._noted))
            self._noted = []
            self._closing = done is None
            self._wake.notify()

    def _write(self) -> None:
        """The writing thread: everything that has gathered is one transaction, and none follows one that failed."""
        problem: StoreError | None = None
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting)
                waiting, self._waiting = self._waiting, []
            problem = problem or self._transact([change for _, noted in waiting for change in noted])
            for done, _ in waiting:
                if done is None:
                    self._writer.close()
                    return
                with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                    done.get_loop().call_soon_threadsafe(_settle, done, problem)

    def _transact(self, changes: list[Change]) -> StoreError | None:
        if _identity(self.path) != self._file:  # SQLite would continue to write into a file without a name
            return StoreError(
                "deleted, or replaced, while in use",
                field=f"--store {self.path}",
                got="another file" if self.path.exists() else "no such file",
                wanted="the file that was opened",
                fix="start the rollout API again; the groups that were queued are lost",
            )
        try:
            if changes:
                self._writer.execute("BEGIN IMMEDIATE")
                for sql, values in changes:
                    self._writer.execute(sql, values)
                self._writer.execute("COMMIT")
        except sqlite3.Error as error:
            return StoreError("cannot be written", field=f"--store {self.path}", got=error)
        return None


def _settle(done: "asyncio.Future[None]", problem: StoreError | None) -> None:
    if done.cancelled():
        return
    if problem is None:
        done.set_result(None)
    else:
        done.set_exception(problem)


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
    db.execute("BEGIN IMMEDIATE")
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


class Overflow:
    """Groups' bytes in a file without a name, which is gone when the process ends, however it ends.

    One thread works on it, in the order of the calls.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "overflow")
        self._file: sqlite3.Connection | None = None

    def submit(self, sql: str, *values: object) -> Future[list[Any]]:
        """Run a statement; return its rows, later."""
        return self._thread.submit(self._run, sql, values)

    def _run(self, sql: str, values: Sequence[object]) -> list[Any]:
        if self._file is None:
            self._file = sqlite3.connect("", isolation_level=None)  # SQLite's name for a file without one
            self._file.execute("CREATE TABLE payloads (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        return self._file.execute(sql, values).fetchall()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


class Payloads:
    """The groups' bytes by id: in memory, and beyond a limit on disk alone.

    The oldest groups are trained first, so it is the newest that are left in the store alone when memory is full.
    Without a store, those that wait are all in memory (`--max-queued-mb` limits them), and those that a trainer holds
    move to a file without a name when memory is full.

    Args:
        known: ids of groups that are in the store already, from an earlier process.
    """

    def __init__(self, store: Store | None, known: Iterable[int] = ()) -> None:
        self.store = store
        self.in_memory = 0
        self._overflow = Overflow()
        self._is_full = False
        self._bodies: dict[int, bytes | None] = dict.fromkeys(known)  # None: on disk alone

    def put(self, group_id: int, body: bytes) -> None:
        """Keep a group's bytes; durably once the store has committed."""
        fits = self.store is None or self.in_memory + len(body) <= MEMORY_BYTES
        self._bodies[group_id] = body if fits else None
        self.in_memory += len(body) if fits else 0
        if self.store is not None:
            self.store.put_payload(group_id, body)

    async def get(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of these groups, in this order.

        Raises:
            StoreError: they cannot be read.
        """
        found = {each: self._bodies[each] for each in ids}
        from_disk = [each for each, body in found.items() if body is None]
        if from_disk and self.store is not None:
            await self.store.commit()
            found |= await asyncio.to_thread(self.store.read_payloads, from_disk)
        elif from_disk:
            query = "SELECT body FROM payloads WHERE id = ?"
            try:
                rows = [await asyncio.wrap_future(self._overflow.submit(query, each)) for each in from_disk]
            except sqlite3.Error as error:
                raise StoreError("groups that a trainer held cannot be read", got=error, fix="use --store") from error
            if lost := [each for each, row in zip(from_disk, rows, strict=True) if not row]:
                field, wanted = "groups that a trainer held", "their bytes"
                fix = "ask for the next batch: these were trained, or forgotten by a reset, meanwhile"
                raise StoreError("the bytes of groups are missing", field=field, got=lost, wanted=wanted, fix=fix)
            found |= {each: row[0][0] for each, row in zip(from_disk, rows, strict=True)}
        return [body for body in found.values() if body is not None]

    async def leave(self, ids: Iterable[int]) -> None:
        """Keep these groups on disk alone: a trainer has them, and they come again only if it is killed.

        Without a store, what fits into memory stays there, and so does what the disk does not take.
        """
        for each in ids:
            body = self._bodies.get(each)
            if body is None or (self.store is None and self.in_memory <= MEMORY_BYTES):
                continue
            if self.store is None:
                statement = "REPLACE INTO payloads VALUES (?, ?)"
                try:
                    await asyncio.wrap_future(self._overflow.submit(statement, each, body))
                except sqlite3.Error as error:
                    if not self._is_full:
                        log.warning("groups that the trainer holds stay in memory (%s); --store names a place", error)
                    self._is_full = True
                    return
                if each not in self._bodies:  # trained, or forgotten by a reset, while it was written
                    self._overflow.submit("DELETE FROM payloads WHERE id = ?", each)
            if self._bodies.get(each) is not None:
                self._bodies[each] = None
                self.in_memory -= len(body)

    def drop(self, ids: Iterable[int]) -> None:
        """Forget these groups."""
        for each in list(ids):
            body = self._bodies.pop(each, b"")
            self.in_memory -= len(body or b"")
            if self.store is not None:
                self.store.drop_payload(each)
            elif body is None:
                self._overflow.submit("DELETE FROM payloads WHERE id = ?", each)

    def clear(self) -> None:
        """Forget everything."""
        self.drop(self._bodies)

    def close(self) -> None:
        """Let the file without a name go."""
        self._overflow.close()
