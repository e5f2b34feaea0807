"""The queue on disk: a SQLite file with a write-ahead log that survives `kill -9` at any moment.

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

import msgspec

from environments.api import wire
from environments.api.records import Journal, R, Run, StoreError
from grpo_common.formats import check_sqlite
from grpo_common.locks import HeldError, hold

_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (kind TEXT NOT NULL, id NOT NULL, body BLOB NOT NULL, PRIMARY KEY (kind, id));
CREATE TABLE IF NOT EXISTS payloads (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
"""
_encode = msgspec.msgpack.encode


class Store(Journal):
    """The journal and the groups' bytes in one file."""

    def __init__(self, path: Path, fsync: bool = False) -> None:
        """Open or create; `fsync` also survives a power cut, at the price of a disk flush per commit.

        Raises:
            StoreError: in use by another process, damaged, not ours, or not writable.
            FormatError: a newer version wrote it. It is as it was.
        """
        self.path = path
        self._noted: list[tuple[str, Sequence[object]]] = []
        self._waiting: list[tuple[asyncio.Future[None] | None, list[tuple[str, Sequence[object]]]]] = []
        self._wake = threading.Condition()
        self._closing = False
        try:
            check_sqlite(path, wire.STORE_FORMAT)
            self._lock = _lock(path)
            path.touch(mode=0o600)  # what models say is its owner's; SQLite gives its other files the same mode
            self._writer = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._reader = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._writer.execute("PRAGMA journal_mode = WAL")
            self._writer.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")
            _prepare(self._writer)
            self._file = _identity(path)
        except (sqlite3.Error, PermissionError, msgspec.DecodeError) as error:
            raise self.damaged(error) from error
        self._reading = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="store", daemon=True)
        self._thread.start()

    def damaged(self, reason: object) -> StoreError:
        return StoreError(
            field=f"--store {self.path}",
            got=reason,
            wanted="a writable file of this program's own, whole",
            fix="restore it from a copy, or move it away: the groups in it are lost then, checkpoints are not",
        )

    def all(self, kind: str, record: type[R]) -> dict[int | str | bytes, R]:
        try:
            rows = self._reader.execute("SELECT id, body FROM items WHERE kind = ? ORDER BY rowid", (kind,))
            return {key: msgspec.msgpack.decode(body, type=record) for key, body in rows}
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise self.damaged(error) from error

    # Changes: noted now, written with the next commit

    def put(self, kind: str, key: int | str | bytes, record: object) -> None:
        self._noted.append(("REPLACE INTO items VALUES (?, ?, ?)", (kind, key, _encode(record))))

    def delete(self, kind: str, key: int | str | bytes) -> None:
        self._noted.append(("DELETE FROM items WHERE kind = ? AND id = ?", (kind, key)))

    def put_payload(self, group_id: int, payload: bytes) -> None:
        """The group's bytes; they are readable once a `commit` has returned."""
        self._noted.append(("INSERT INTO payloads VALUES (?, ?)", (group_id, payload)))

    def drop_payload(self, group_id: int) -> None:
        """The group's bytes are not needed any more."""
        self._noted.append(("DELETE FROM payloads WHERE id = ?", (group_id,)))

    def reset(self) -> None:
        self._noted += [("DELETE FROM items", ()), ("DELETE FROM payloads", ())]

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
        """The bytes of committed groups; call it from a thread of your own, it may wait for the disk."""
        try:
            with self._reading:
                query = "SELECT body FROM payloads WHERE id = ?"
                found = {each: self._reader.execute(query, (each,)).fetchone() for each in ids}
        except sqlite3.Error as error:
            raise self.damaged(error) from error
        if lost := [each for each, row in found.items() if row is None]:
            raise StoreError(
                "the bytes of groups are missing", field=f"--store {self.path}", got=lost, fix="was the file edited?"
            )
        return {each: row[0] for each, row in found.items()}

    def close(self) -> None:
        """Write what is noted, and let the file go."""
        self._hand_over(None)
        self._thread.join()
        self._reader.close()
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

    def _transact(self, changes: list[tuple[str, Sequence[object]]]) -> StoreError | None:
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


def _prepare(db: sqlite3.Connection) -> None:
    """Make the tables; move what is in those of format 1 (a table for each kind), all in one transaction."""
    db.execute("BEGIN IMMEDIATE")
    former = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    for statement in _SCHEMA.split(";"):
        db.execute(statement)
    if "groups" in former:
        (last,) = db.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = 'groups'").fetchone()
        for key, body in db.execute("SELECT id, body FROM run").fetchall():
            run = msgspec.structs.replace(msgspec.msgpack.decode(body, type=Run), next_group=(last or 0) + 1)
            db.execute("INSERT INTO items VALUES ('run', ?, ?)", (key, _encode(run)))
        db.execute("INSERT INTO items SELECT 'environment', id, body FROM environments")
        db.execute(
            "INSERT INTO items SELECT iif(place = 'buffer', 'buffered', 'group'), id, body FROM groups ORDER BY id"
        )
        db.execute("INSERT INTO items SELECT 'lease', batch_id, body FROM leases")
        db.execute("INSERT INTO items SELECT 'closed', batch_id, body FROM closed ORDER BY number")
        for table, kinds in (("posts", ("post", "unkeyed")), ("unanswered", ("unanswered",))):
            for key, when in db.execute(f"SELECT * FROM {table}").fetchall() if table in former else ():
                for kind in kinds:
                    db.execute("INSERT INTO items VALUES (?, ?, ?)", (kind, key, _encode(when)))
        for table in former & {"run", "environments", "groups", "leases", "closed", "posts", "unanswered"}:
            db.execute(f"DROP TABLE {table}")
    db.execute(f"PRAGMA user_version = {wire.STORE_FORMAT}")
    db.execute("COMMIT")


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
