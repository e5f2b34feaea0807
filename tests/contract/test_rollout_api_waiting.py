"""Requests that wait, over HTTP: for a batch, for room, and not beyond the end of client or server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.test_rollout_api import ENV, TRAINER, group
from tests.rollout_api import ServerProcess, running_server

LONG = 15  # seconds, of which nothing here takes as much
SIX = {"current_step", "queue_size", "unallocated_fraction", "self_queue_size", "max_group_size", "env_weight"}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server() as server:
        yield server


@pytest.fixture
def api(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        client.post("/reset_data")
        client.post("/register", json=TRAINER).raise_for_status()
        assert client.get("/batch").json() == {"batch": None}
        yield client


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def waiting(threads: ThreadPoolExecutor, api: httpx.Client, path: str) -> Future[Any]:
    """A request under way; a moment later, as the server counts by then on it."""
    future = threads.submit(lambda: api.get(path).json())
    threading.Event().wait(0.3)
    assert not future.done()
    return future


def register(api: httpx.Client) -> int:
    return api.post("/register-env", json=ENV).json()["env_id"]


def post(api: httpx.Client, env_id: int) -> None:
    assert api.post("/scored_data", json=group(env_id=env_id)).status_code == 200


def test_a_batch_is_answered_when_it_is_complete(api: httpx.Client, threads: ThreadPoolExecutor) -> None:
    env_id = register(api)
    future = waiting(threads, api, f"/batch?lease=60&wait={LONG}")
    post(api, env_id)
    threading.Event().wait(0.2)
    assert not future.done()
    post(api, env_id)
    assert len(future.result(LONG / 2)["batch"]) == 2


def test_no_batch_is_told_as_ever_when_the_time_is_over(api: httpx.Client) -> None:
    assert api.get("/batch?wait=0.2").json() == {"batch": None}
    assert api.get("/batch?wait=61").status_code == api.get("/batch?wait=x").status_code == 422


def test_a_trainer_that_waits_hears_that_another_has_taken_over(api: httpx.Client, threads: ThreadPoolExecutor) -> None:
    uuid = api.post("/register", json=TRAINER).json()["uuid"]
    future = waiting(threads, api, f"/batch?lease=60&uuid={uuid}&wait={LONG}")
    api.post("/register", json=TRAINER)
    assert future.result(LONG / 2)["reason"] == "taken over"


def test_no_batch_is_leased_to_a_client_that_has_gone(api: httpx.Client, server: ServerProcess) -> None:
    env_id = register(api)
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=0.3) as impatient:
        impatient.get(f"/batch?lease=60&wait={LONG}")
    post(api, env_id)
    post(api, env_id)
    assert not api.get("/status").json()["leases"]
    assert len(api.get("/batch").json()["batch"]) == 2


def test_room_is_told_when_a_batch_leaves_and_when_the_step_moves(
    api: httpx.Client, threads: ThreadPoolExecutor
) -> None:
    env_id = register(api)
    known = api.get(f"/status-env?env_id={env_id}&wait=0").json()
    assert known.keys() == SIX | {"leased", "seen"} and known["leased"] == 0
    future = waiting(threads, api, f"/status-env?env_id={env_id}&wait={LONG}&seen={known['seen']}")
    post(api, env_id)
    post(api, env_id)
    threading.Event().wait(0.2)
    assert not future.done()  # groups that arrive leave no more room
    batch_id = api.get("/batch?lease=60").json()["batch_id"]
    leased = future.result(LONG / 2)
    assert (leased["queue_size"], leased["leased"]) == (0, 2)
    future = waiting(threads, api, f"/status-env?env_id={env_id}&wait={LONG}&seen={leased['seen']}")
    api.post(f"/batch/{batch_id}/extend?lease=60&step=4").raise_for_status()
    trained = future.result(LONG / 2)
    assert (trained["current_step"], trained["leased"]) == (4, 0)  # it is kept for a checkpoint only
    assert api.get(f"/status-env?env_id={env_id}").json().keys() == SIX


def test_who_has_seen_something_else_is_answered_at_once(api: httpx.Client) -> None:
    env_id = register(api)
    known = api.get(f"/status-env?env_id={env_id}&wait={LONG}&seen=").json()
    assert api.get(f"/status-env?env_id={env_id}&wait={LONG}&seen=another").json() == known
    assert api.get(f"/status-env?env_id={env_id}&wait=0.2&seen={known['seen']}").json() == known


def test_an_environment_that_is_forgotten_hears_of_it(api: httpx.Client, threads: ThreadPoolExecutor) -> None:
    env_id = register(api)
    known = api.get(f"/status-env?env_id={env_id}&wait=0").json()
    future = waiting(threads, api, f"/status-env?env_id={env_id}&wait={LONG}&seen={known['seen']}")
    api.post("/reset_data")
    assert future.result(LONG / 2)["field"] == "env_id"


def test_a_signal_ends_a_server_on_which_requests_wait(threads: ThreadPoolExecutor) -> None:
    with running_server() as server, httpx.Client(base_url=server.url, timeout=30) as client:
        client.post("/register", json=TRAINER)
        client.get("/batch")
        env_id = register(client)
        seen = client.get(f"/status-env?env_id={env_id}&wait=0").json()["seen"]
        news = waiting(threads, client, f"/status-env?env_id={env_id}&wait={LONG}&seen={seen}")
        batch = waiting(threads, client, f"/batch?wait={LONG}")
        assert server.stop() == 0
        assert news.result(1)["seen"] == seen and batch.result(1) == {"batch": None}


def test_what_was_trained_on_is_known_after_a_crash(tmp_path: Any) -> None:
    with running_server("--store", str(tmp_path / "queue.sqlite")) as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            client.post("/register", json=TRAINER)
            client.get("/batch")
            env_id = register(client)
            for _ in range(4):
                post(client, env_id)
            trained = client.get("/batch?lease=60").json()["batch_id"]
            client.get("/batch?lease=60")
            client.post(f"/batch/{trained}/extend?lease=60&step=4").raise_for_status()
        server.kill()
        server.start()
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert client.get(f"/status-env?env_id={env_id}&wait=0").json()["leased"] == 2
