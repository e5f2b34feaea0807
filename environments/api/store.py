"""The queue on disk: a SQLite journal (write-ahead log) that survives `kill -9` at any moment.

Changes are collected while the event loop runs and written by one thread, everything that has gathered in one
transaction: the more clients wait, the more a commit carries. Answers are sent after `commit` returns.
"""

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from environments.api import wire
from environments.api.records import Closed, Environment, Group, Journal, Lease, Place, Run, Snapshot
from grpo_common.errors import UserError
from grpo_common.formats import check_sqlite
from grpo_common.locks import HeldError, hold

REMEMBERED_POSTS_S = 600.0
"""How long the key of a posted group is remembered."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (id INTEGER PRIMARY KEY CHECK (id = 0), body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS environments (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS groups (id INTEGER PRIMARY KEY AUTOINCREMENT, place TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS payloads (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS leases (batch_id TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS closed (number INTEGER PRIMARY KEY, batch_id TEXT NOT NULL UNIQUE, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS posts (key BLOB PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unanswered (key BLOB PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID;
"""

Change = tuple[str, Sequence[object]]
R = TypeVar("R")


class StoreError(UserError):
    """The store cannot be opened, read or written."""


class Store(Journal):
    """The journal and the groups' bytes in one SQLite file."""

    def __init__(self, path: Path, fsync: bool = False) -> None:
        """Open or create; `fsync` also survives a power cut, at the price of a disk flush per commit.

        Raises:
            StoreError: in use by another process, not ours, or not writable.
            FormatError: a newer version wrote it. It is as it was.
        """
        self.path = path
        self._noted: list[Change] = []
        self._ready: list[Change] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._wake = threading.Condition()
        self._closing = False
        try:
            check_sqlite(path, wire.STORE_FORMAT)
            self._lock = _lock(path)
            self._writer = _connect(path, fsync)
            self._reader = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._writer.executescript(_SCHEMA)
            self._writer.execute(f"PRAGMA user_version = {wire.STORE_FORMAT}")
            self._file = _identity(path)
        except (sqlite3.Error, PermissionError) as error:
            raise StoreError(
                field=f"--store {path}", got=error, wanted="a writable file of this program's own"
            ) from error
        self._reading = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="store", daemon=True)
        self._thread.start()

    def load(self) -> Snapshot:
        """What was written down, without the groups' bytes."""
        rows = self._reader.execute
        run = rows("SELECT body FROM run").fetchone()
        last = rows("SELECT seq FROM sqlite_sequence WHERE name = 'groups'").fetchone()
        return Snapshot(
            run=_decode(run[0], Run) if run else None,
            environments=[_decode(body, Environment) for (body,) in rows("SELECT body FROM environments ORDER BY id")],
            groups=[
                (_decode(body, Group), place) for place, body in rows("SELECT place, body FROM groups ORDER BY id")
            ],
            leases=[_decode(body, Lease) for (body,) in rows("SELECT body FROM leases")],
            closed={
                batch_id: _decode(body, Closed)
                for batch_id, body in rows("SELECT batch_id, body FROM closed ORDER BY number")
            },
            next_group=last[0] + 1 if last else 1,
        )

    def posts(self) -> list[tuple[bytes, float]]:
        """Keys of the groups posted of late, each with its time."""
        return self._reader.execute("SELECT key, at FROM posts").fetchall()

    def unanswered(self, now: float) -> list[bytes]:
        """Keys of posts that a crash may have left without an answer, and that may still be repeated."""
        return [key for (key,) in self._reader.execute("SELECT key FROM unanswered WHERE until > ?", (now,))]

    # Changes: noted now, written with the next commit

    def put_run(self, run: Run) -> None:
        self._note("REPLACE INTO run VALUES (0, ?)", _encode(run))

    def put_environment(self, environment: Environment) -> None:
        self._note("REPLACE INTO environments VALUES (?, ?)", environment.id, _encode(environment))

    def put_group(self, group: Group, place: Place) -> None:
        self._note("INSERT INTO groups VALUES (?, ?, ?)", group.id, place, _encode(group))

    def put_payload(self, group_id: int, payload: bytes) -> None:
        """The group's bytes; they are readable once a `commit` has returned."""
        self._note("INSERT INTO payloads VALUES (?, ?)", group_id, payload)

    def put_post(self, key: bytes, now: float) -> None:
        """A group with this key was posted; keys older than `REMEMBERED_POSTS_S` are forgotten."""
        self._note("REPLACE INTO posts VALUES (?, ?)", key, now)

    def put_unanswered(self, key: bytes, until: float) -> None:
        """The post with this key may have had no answer: until then, a repeated one is the same post."""
        self._note("REPLACE INTO unanswered VALUES (?, ?)", key, until)

    def drop_unanswered(self, key: bytes) -> None:
        """The post with this key was repeated."""
        self._note("DELETE FROM unanswered WHERE key = ?", key)

    def forget_posts(self, before: float, now: float) -> None:
        """Forget the keys of posts older than `before`, and which posts could be repeated until `now`."""
        self._note("DELETE FROM posts WHERE at < ?", before)
        self._note("DELETE FROM unanswered WHERE until <= ?", now)

    def move(self, groups: Iterable[int], place: Place) -> None:
        for each in groups:
            self._note("UPDATE groups SET place = ? WHERE id = ?", place, each)

    def drop(self, groups: Iterable[int]) -> None:
        for each in groups:
            self._note("DELETE FROM groups WHERE id = ?", each)
            self._note("DELETE FROM payloads WHERE id = ?", each)

    def put_lease(self, lease: Lease) -> None:
        self._note("REPLACE INTO leases VALUES (?, ?)", lease.batch_id, _encode(lease))

    def close_lease(self, batch_id: str, closed: Closed) -> None:
        self._note("DELETE FROM leases WHERE batch_id = ?", batch_id)
        self._note("REPLACE INTO closed (batch_id, body) VALUES (?, ?)", batch_id, _encode(closed))

    def forget_leases(self, keep: int) -> None:
        """Forget how all but the newest leases ended."""
        self._note("DELETE FROM closed WHERE number <= (SELECT max(number) FROM closed) - ?", keep)

    def reset(self) -> None:
        for table in ("run", "environments", "groups", "payloads", "leases", "closed", "posts", "unanswered"):
            self._note(f"DELETE FROM {table}")

    def _note(self, sql: str, *values: object) -> None:
        self._noted.append((sql, values))

    # Writing

    async def commit(self) -> None:
        """Return when everything noted so far is written.

        Raises:
            StoreError: it could not be written; the store is not usable any more.
        """
        if self._closing:
            raise StoreError(field=f"--store {self.path}", got="a store that is closed")
        done = asyncio.get_running_loop().create_future()
        with self._wake:
            self._hand_over()
            self._waiting.append(done)
            self._wake.notify()
        await done

    def read_payloads(self, ids: Iterable[int]) -> dict[int, bytes]:
        """The bytes of committed groups; call it from a thread of your own, it may wait for the disk."""
        with self._reading:
            query = "SELECT body FROM payloads WHERE id = ?"
            found = {each: self._reader.execute(query, (each,)).fetchone() for each in ids}
        if lost := [each for each, row in found.items() if row is None]:
            raise StoreError(
                "the bytes of groups are missing", field=f"--store {self.path}", got=lost, fix="was the file edited?"
            )
        return {each: row[0] for each, row in found.items()}

    def close(self) -> None:
        """Write what is noted, and let the file go."""
        with self._wake:
            self._hand_over()
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._reader.close()
        os.close(self._lock)

    def _hand_over(self) -> None:
        """Give the thread what is noted; in one piece, so that no transaction holds half a change."""
        self._ready += self._noted
        self._noted = []

    def _write(self) -> None:
        """The writing thread: everything that has gathered is one transaction, and none follows one that failed."""
        problem: StoreError | None = None
        while True:
            with self._wake:
                while not self._waiting and not self._closing:
                    self._wake.wait()
                waiting, self._waiting = self._waiting, []
                changes, self._ready = self._ready, []
                last = self._closing
            problem = problem or self._transact(changes)  # later changes are of groups that are not written
            for done in waiting:
                with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                    done.get_loop().call_soon_threadsafe(_settle, done, problem)
            if last:
                self._writer.close()
                return

    def _transact(self, changes: list[Change]) -> StoreError | None:
        if _identity(self.path) != self._file:  # SQLite would continue to write into a file without a name
            return StoreError(
                "deleted, or replaced, while in use",
                field=f"--store {self.path}",
                got="another file" if self.path.exists() else "no such file",
                wanted="the file that was opened",
                fix="start the rollout API again; the groups that were queued are lost",
            )
        if not changes:
            return None
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            for sql, values in changes:
                self._writer.execute(sql, values)
            self._writer.execute("COMMIT")
        except sqlite3.Error as error:
            return StoreError("cannot be written", field=f"--store {self.path}", got=error)
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file a path names now; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _settle(done: "asyncio.Future[None]", problem: StoreError | None) -> None:
    if done.cancelled():
        return
    if problem is None:
        done.set_result(None)
    else:
        done.set_exception(problem)


def _connect(path: Path, fsync: bool) -> sqlite3.Connection:
    path.touch(mode=0o600)  # what models say is its owner's; SQLite gives its other files the same mode
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
    return connection


def _lock(path: Path) -> int:
    """Hold the store for this process; the kernel lets go when it ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return hold(Path(f"{path}.lock"))
    except HeldError as held:
        raise StoreError(
            "in use", field=f"--store {path}", got=f"process {held.holder}", fix="stop it or give another file"
        ) from None
    except OSError as error:
        raise StoreError(field=f"--store {path}", got=error.strerror, wanted="a writable place") from error


def _encode(record: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(record)


def _decode(body: bytes, record: type[R]) -> R:
    return msgspec.msgpack.decode(body, type=record)
