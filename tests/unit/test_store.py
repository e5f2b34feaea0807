"""The store: what was committed is there again, and what cannot be opened says why."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from environments.api import wire
from environments.api.errors import StoreError
from environments.api.groups import Posted, read
from environments.api.service import Service
from environments.api.settings import Settings
from environments.api.store import Payloads, Store
from tests.old_runs import UNFINISHED
from tests.unit.factories import refusing
from tests.unit.test_queue import env, trainer


def posted(number: int, env_id: int | None = None, size: int = 4) -> Posted:
    rows = [[number, each] for each in range(size)]
    group = wire.ScoredData(tokens=rows, masks=rows, scores=[0.5] * size, env_id=env_id)
    return read(wire.encode_group(group), wire.MSGPACK)


@asynccontextmanager
async def serving(path: Path, batch_size: int | None = None, **clocks: Any) -> AsyncIterator[Service]:
    """A life of the rollout API, to which a trainer of batches of this size comes at once."""
    service = Service(Settings(store=path), **clocks)
    if batch_size is not None:
        await service.register(trainer(batch_size))
    yield service
    service.close()


async def leased(service: Service, seconds: float = 1000.0) -> tuple[str, list[int]]:
    """The next batch: its id, and which groups of `posted` it has."""
    batch = await service.next_batch(lease=seconds)
    assert batch is not None and batch.lease is not None
    return batch.lease.batch_id, [wire.decode_group(each).tokens[0][0] for each in batch.payloads]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the store is."""
    return tmp_path / "s"


async def test_everything_is_there_again(path: Path) -> None:
    async with serving(path, 8) as service:
        await service.next_batch()
        await service.register_environment(env(4, share=0.5))
        for each in range(6):
            service.take(posted(each, env_id=0))
        service.take(posted(6, env_id=0, size=3))
        await service.written()
        kept, _ = await leased(service)
        acknowledged, _ = await leased(service)
        await service.acknowledge(acknowledged, None)
    async with serving(path) as service:
        status = service.status()
        assert (status.current_step, status.queue_size, status.leased_groups, status.buffered_groups) == (1, 2, 2, 1)
        assert [each.name for each in status.environments] == ["env_0"]
        assert service.queue.minima() == {0: 4}
        assert (await leased(service))[1] == [4, 5]
        await service.release(kept)
        assert (await leased(service))[1] == [0, 1]


async def test_a_lease_has_all_its_time_again_after_a_restart_whatever_the_clocks_say(path: Path) -> None:
    async with serving(path, 4, clock=lambda: 1e9, timer=lambda: 5000.0) as service:
        service.take(posted(0))
        await leased(service, 100.0)
        service.queue.tick(5099.0)
        await service.written()
    async with serving(path, clock=lambda: 5e9, timer=lambda: 3.0) as service:  # of a restarted machine
        for seconds, groups in ((99.0, 1), (100.0, 0)):
            service.queue.tick(3.0 + seconds)
            assert service.status().leased_groups == groups


LEASED, QUEUED, BUFFERED, LAST_POST = range(13, 21), 21, 22, b"key of 21"
"""Groups of the queue that the released version left."""


def write_format_1(path: Path) -> None:
    """That queue, in which groups 23 and 24 are trained; the last post, at time 100, was that of the buffered group."""
    shutil.copy(UNFINISHED / "queue.sqlite", path)
    payload = posted(BUFFERED, env_id=0).payload
    with closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM leases WHERE batch_id = '0b875dad4e4eb207'")
        db.execute("DELETE FROM groups WHERE id > 22")
        db.execute("UPDATE groups SET place = iif(id = 21, 'queue', 'buffer') WHERE id > 20")
        db.execute("UPDATE payloads SET body = ? WHERE id = ?", (payload, BUFFERED))
        db.execute("UPDATE posts SET at = 91.0")
        for key, at in ((LAST_POST, 98.0), (hashlib.blake2b(payload, digest_size=16).digest(), 100.0)):
            db.execute("INSERT INTO posts VALUES (?, ?)", (key, at))
        db.commit()


async def test_a_queue_of_format_1_is_taken_over_whole(path: Path) -> None:
    write_format_1(path)
    async with serving(path, clock=lambda: 110.0) as service:
        queue = service.queue
        assert ([*queue.line], [*queue.groups], [*queue.buffered]) == ([QUEUED], [*LEASED, QUEUED], [BUFFERED])
        assert queue.run is not None and (queue.run.current_step, queue.run.started, queue.next_group) == (5, True, 25)
        assert queue.acknowledge("da1043760e009b29") == ()
        assert [(lease.groups, lease.trained) for lease in queue.leases.values()] == [
            ((13, 14, 15, 16), True),
            ((17, 18, 19, 20), True),
        ]
        assert service.take(posted(BUFFERED, env_id=0)).status == "received"  # repeated: its answer may be lost
        assert service.take(posted(0, env_id=0), LAST_POST).status == "received"
        assert (service.status().queue_size, service.status().buffered_groups) == (1, 1)
        await service.register(trainer(4))
        assert sorted([*queue.line, *queue.buffered]) == [*LEASED, QUEUED, BUFFERED]
        batch_id, _ = await leased(service)
        assert queue.leases[batch_id].groups == (13,)
    with closing(sqlite3.connect(path)) as db:
        names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert names == {"items", "payloads", "sqlite_sequence"}


async def test_a_lease_of_format_1_that_had_a_deadline_has_the_usual_time(path: Path) -> None:
    """The first versions wrote when it would run out, by a clock that tells nothing of now, and nothing of a holder."""
    write_format_1(path)
    first = {"batch_id": "de5170cb9015447a", "groups": [13, 14, 15, 16], "deadline": 12.5, "request": "r"}
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE leases SET body = ? WHERE batch_id = 'de5170cb9015447a'", (msgspec.msgpack.encode(first),))
        db.commit()
    async with serving(path, timer=lambda: 3.0) as service:
        lease = service.queue.leases["de5170cb9015447a"]
        assert (lease.groups, lease.request, lease.holder, lease.trained) == ((13, 14, 15, 16), "r", None, False)
        assert service.queue.deadlines[lease.batch_id] == 603.0  # now, and 600 s
        service.queue.tick(603.0)
        assert {13, 14, 15, 16} <= service.queue.line.keys()


def altered(statement: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with closing(sqlite3.connect(path)) as db:
            db.execute(statement)
            db.commit()

    return damage


def overwrite_pages(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))


def write_foreign_records_of_format_1(path: Path) -> None:
    path.unlink()
    write_format_1(path)
    altered("UPDATE run SET body = x'c1'")(path)


@pytest.mark.parametrize(
    "damage",
    [
        altered("UPDATE items SET body = x'c1' WHERE kind = 'group'"),
        altered("DELETE FROM items WHERE kind = 'group'"),  # one that is leased
        overwrite_pages,
        write_foreign_records_of_format_1,
    ],
)
async def test_a_damaged_store_is_refused_by_name_and_stays_as_it_is(
    path: Path, damage: Callable[[Path], None]
) -> None:
    async with serving(path, 4) as service:
        service.take(posted(0))
        await leased(service)
    damage(path)
    damaged = path.read_bytes()
    command = [sys.executable, "-m", "environments.api", "--port", "0", "--store", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 2 and f"error: --store {path}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and path.read_bytes() == damaged


async def test_a_group_that_a_full_disk_did_not_take_is_not_leased_after_all(path: Path) -> None:
    """A lease is so small that the disk may have room for it; the store would then have a lease of no group."""
    async with serving(path, 4000) as service:
        writer = service.store._writer
        (pages,) = writer.execute("PRAGMA page_count").fetchone()
        writer.execute(f"PRAGMA max_page_count = {pages}")
        service.take(posted(0, size=4000))
        with pytest.raises(StoreError) as full:
            await service.written()
        assert "full" in str(full.value.got)
        writer.execute(f"PRAGMA max_page_count = {pages + 100}")
        with pytest.raises(StoreError):
            await service.next_batch(lease=1000.0)
    async with serving(path, 4000) as service:
        service.take(posted(0, size=4000))
        await leased(service)


@pytest.mark.parametrize("how", ["deleted", "replaced"])
async def test_a_file_that_is_gone_ends_the_service_though_sqlite_would_go_on(path: Path, how: str) -> None:
    async with serving(path, 4) as service:
        path.unlink()
        if how == "replaced":
            path.write_bytes(b"another run's")
        keeper = asyncio.create_task(service.keep_time(every=0.01))
        async with asyncio.timeout(20):
            await service.failed.wait()  # though nobody posts anything
        with pytest.raises(StoreError):
            await keeper
    error = service.failure
    assert error is not None and error.field == f"--store {path}"
    assert (error.got == "another file") == path.exists() == (how == "replaced")


async def test_an_environment_that_was_killed_with_the_api_keeps_its_name(path: Path) -> None:
    for heard, names in (([], ["env_0", "env_1"]), ([1], ["env_0", "env_2"])):
        async with serving(path) as service:
            if not heard:
                await service.register(trainer(8))
                await service.next_batch()
            for each in heard:
                service.status_env(each)  # a sign of life: this one was not killed
            assert [(await service.register_environment(env(4))).wandb_name for _ in names] == names


@pytest.mark.parametrize(
    ("lives", "sizes"),
    [
        ([(0.0, [1]), (1.0, [1]), (2.0, [2])], [1, 1, 2]),  # the same post after a crash: its answer was lost
        ([(0.0, [1]), (1.0, [1, 1])], [1, 2]),  # once
        ([(0.0, [1]), (20.0, [2]), (100.0, [1])], [1, 2, 2]),  # also after a second crash
        ([(0.0, [1]), (20.0, [2]), (400.0, [1])], [1, 2, 3]),  # two minutes are over
    ],
)
async def test_a_post_that_was_never_answered_may_be_repeated(path: Path, lives: Any, sizes: list[int]) -> None:
    """Each life of the API begins at a time and gets posts without a key."""
    found = []
    for date, posts in lives:
        async with serving(path, clock=lambda date=date: date) as service:
            for number in posts:
                service.take(posted(number))
            await service.written()
            found.append(service.status().queue_size)
    assert found == sizes


async def test_ids_are_never_given_twice(path: Path) -> None:
    async with serving(path, 4) as service:
        for each in range(3):
            service.take(posted(each))
            await service.next_batch()
    async with serving(path, 4) as service:
        assert service.queue.next_group == 3  # all groups were trained and deleted


async def test_beyond_the_memory_limit_groups_lie_on_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.api.store.MEMORY_BYTES", 250)
    payloads = Payloads(store := Store(path))
    for each in range(5):
        payloads.put(each, bytes([each]) * 100)
    assert payloads.in_memory == 200
    assert await payloads.get([4, 0, 2]) == [bytes([4]) * 100, bytes([0]) * 100, bytes([2]) * 100]
    await payloads.leave([0])  # a trainer has it: it need not be in memory
    assert payloads.in_memory == 100 and await payloads.get([0]) == [bytes(100)]
    payloads.drop([0, 1, 4])
    payloads.put(5, b"x" * 100)
    assert payloads.in_memory == 100
    store.close()


async def test_without_a_store_groups_of_a_trainer_lie_on_disk_beyond_the_memory_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("environments.api.store.MEMORY_BYTES", 1000)
    service = Service(Settings())
    await service.register(trainer(4))
    batches = []
    for each in range(40):  # none is acknowledged: there is no checkpoint yet
        service.take(posted(each))
        batches.append(await leased(service))
        assert service.payloads.in_memory <= 1000
    assert [groups for _, groups in batches] == [[each] for each in range(40)]
    for batch_id, _ in batches[::2]:
        await service.acknowledge(batch_id)
    await service.register(trainer(4))  # another trainer: what was not acknowledged comes again
    again = [await leased(service) for _ in range(20)]
    assert [groups for _, groups in again] == [[each] for each in range(1, 40, 2)]
    await asyncio.gather(*(service.payloads.leave([each]) for each in (1, 1, 39)))  # a repeated request
    await service.release(again[0][0])
    assert (await leased(service))[1] == [1]
    await service.reset()
    left = service.store._writer.execute("SELECT count(*) FROM payloads").fetchone()
    assert service.payloads.in_memory == 0 and left == (0,)
    service.close()


async def test_without_a_store_groups_that_are_forgotten_while_they_are_read_are_read_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("environments.api.store.MEMORY_BYTES", 0)
    payloads = Payloads(store := Store(None))
    for each in range(2):
        payloads.put(each, b"x")
    await payloads.leave([0, 1])
    reading = asyncio.create_task(payloads.get([0, 1]))
    await asyncio.sleep(0)  # they are asked for
    payloads.drop([1])
    await store.commit()
    assert await reading == [b"x", b"x"]
    store.close()


async def test_without_a_store_groups_that_the_disk_does_not_take_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("environments.api.store.MEMORY_BYTES", 0)
    payloads = Payloads(store := Store(None))
    store._writer.execute("PRAGMA max_page_count = 4")
    for each in range(9):
        payloads.put(each, bytes([each]) * 4000)
        await payloads.leave([each])
    assert 0 < payloads.in_memory < 9 * 4000 and caplog.text.count("--store") == 1
    assert await payloads.get(range(9)) == [bytes([each]) * 4000 for each in range(9)]
    store.close()


async def test_without_a_store_a_file_that_fails_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("environments.api.store.MEMORY_BYTES", 0)
    service = Service(Settings())
    await service.register(trainer(4))
    service.take(posted(0))
    batch_id, _ = await leased(service)
    service.store._writer.execute("DROP TABLE payloads")
    await service.acknowledge(batch_id)  # the group that lies in the file can't be deleted there
    assert service.failure is None and "payloads" in caplog.text
    service.take(posted(1))
    assert (await leased(service))[1] == [1]
    service.close()


@pytest.mark.parametrize("is_durable", [True, False])
async def test_an_error_of_another_kind_is_an_answer_and_the_next_calls_have_theirs(
    path: Path, is_durable: bool
) -> None:
    store = Store(path if is_durable else None)
    too_large = 1 << 70  # sqlite3 raises an OverflowError
    with pytest.raises(StoreError, match="too large"):
        await store.read([too_large])
    store.note("DELETE FROM payloads WHERE id = ?", too_large)
    for _ in range(2 if is_durable else 1):  # nothing is written after what was not
        with pytest.raises(StoreError):
            await store.commit()
    store.close()


@pytest.mark.parametrize("table", ["users", "groups", "items"])
def test_the_database_of_another_program_stays_as_it_is(tmp_path: Path, table: str) -> None:
    with closing(sqlite3.connect(tmp_path / "s")) as db:
        db.execute(f"CREATE TABLE {table} (a)")
        db.commit()
    before = (tmp_path / "s").read_bytes()
    with pytest.raises(StoreError, match="another program"):
        Store(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == before


def test_a_store_in_use_and_a_file_that_is_none_are_refused_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    with refusing(StoreError, f"--store {tmp_path / 's'}", got=f"process {os.getpid()}"):
        Store(tmp_path / "s")
    store.close()
    Store(tmp_path / "s").close()
    with pytest.raises(StoreError, match="too long"):
        Store(tmp_path / ("s" * 300))
    (tmp_path / "x").write_bytes(b"certainly not SQLite" * 100)
    with pytest.raises(StoreError) as error:
        Store(tmp_path / "x")
    assert error.value.field == f"--store {tmp_path / 'x'}" and isinstance(error.value.__cause__, sqlite3.DatabaseError)
