"""The trainer's end of the rollout API, client and feed, against the real one."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_common.status import VARIABLE, Status, StatusWriter, parse
from grpo_trainer import phases
from grpo_trainer.batch.batching import ReadyBatch, ready
from grpo_trainer.config.train import RolloutConfig, TrainConfig
from grpo_trainer.errors import ServerError, StoppedError, TrainingError
from grpo_trainer.feed import BatchFeed
from grpo_trainer.metrics.types import reduce
from grpo_trainer.rollouts import client as client_module
from grpo_trainer.rollouts.client import RolloutClient
from grpo_trainer.rollouts.filter import GroupFilter
from grpo_trainer.saving.manifest import Progress
from tests.processes import once, wait_for
from tests.rollout_api import ServerProcess
from tests.stand_ins import Reply, answering, registration
from tests.unit.factories import refusing

BATCH = 4
RUN: dict[str, Any] = {"max_token_len": 10, "num_steps": 9, "eval_every": 5}
ENVIRONMENT: dict[str, Any] = {"max_token_length": 10, "weight": 1.0, "group_size": 2}


class Api(ServerProcess):
    """A rollout API process that can be stopped and started again on its port."""

    def post(self, *values: int, version: int = 0, sizes: int = 2) -> None:
        """One group per value; the value, and one more for each of its sequences, is the completion's only token."""
        for value in values:
            group = {
                "tokens": [[1, 2, value + i] for i in range(sizes)],
                "masks": [[-100, -100, value + i] for i in range(sizes)],
                "scores": [float(i) for i in range(sizes)],
                "inference_logprobs": [[1.0, 1.0, -0.5 / (1 + i)] for i in range(sizes)],
                "policy_versions": [version] * sizes,
            }
            httpx.post(self.url + "/scored_data", json=group, trust_env=False).raise_for_status()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("api")
    made = Api(("--store", str(folder / "queue.sqlite")), log=folder / "api.log")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def api(server: Api) -> Api:
    """The API without a run; a test that stops it starts it again."""
    httpx.post(server.url + "/reset_data", trust_env=False).raise_for_status()
    return server


def do_nothing() -> None: ...


def feed(
    api: Api, *, check_stop: Callable[[], None] = do_nothing, at: Progress | None = None, **options: object
) -> Any:
    """A feed that is registered, and has one batch at a time unless `prefetch` is given."""
    progress = at or Progress()
    config = RolloutConfig.model_validate({"atropos_url": api.url, "rollout_timeout": 20, "prefetch": False, **options})
    client = RolloutClient(config, registration(BATCH, **RUN, starting_step=progress.step), check_stop)
    train = TrainConfig(model_name="m", seq_len=10, batch_size=2)
    made = BatchFeed(client, config, GroupFilter(None, str), lambda batch: ready(batch, train), check_stop)
    made.begin(progress)
    return made


def first_tokens(batch: ReadyBatch) -> list[int]:
    return [int(group.samples[0].tokens_T[-1]) for group in batch.rollouts.groups]


def trained(batch: ReadyBatch) -> list[int]:
    """Last tokens of what is trained on."""
    return sorted(int(sequence.tokens_T[-1]) for sequence in batch.sequences)


def finish(rollouts: Any, batch: ReadyBatch, step: int) -> None:
    """Trained, and on the disk."""
    done = rollouts.trained(batch)
    rollouts.report(step)
    rollouts.settle(done)


def post(api: Api, path: str, **body: object) -> dict[str, Any]:
    return httpx.post(api.url + path, json=body, trust_env=False).raise_for_status().json()


def status(api: Api) -> dict[str, Any]:
    return httpx.get(api.url + "/status", trust_env=False).json()


def test_an_acknowledged_batch_never_comes_again_a_released_one_does(api: Api) -> None:
    rollouts = feed(api)
    api.post(10, 12, 14, 16)
    first = rollouts.next(0)
    rollouts.release(first)
    again = rollouts.next(0)
    assert first_tokens(again) == first_tokens(first) == [10, 12]
    finish(rollouts, again, 1)
    assert first_tokens(rollouts.next(0)) == [14, 16]
    assert status(api)["current_step"] == 1


def test_a_trainer_that_waits_for_a_batch_says_so_until_it_has_one(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path, writer = tmp_path / "status.json", StatusWriter()
    monkeypatch.setattr(phases, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(client_module, "OWN", writer)
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    monkeypatch.setenv(VARIABLE, str(path))
    writer.open()

    def said() -> Status:
        return (path.exists() and parse(path.read_bytes())) or Status()

    rollouts = feed(api)
    with caplog.at_level(logging.INFO), once(lambda: said().lacks_batch, lambda: api.post(10, 12, 14, 16)):
        rollouts.next(0)
    assert not said().lacks_batch
    assert said().notices[0].waits


def test_feed_drops_stale_groups_and_counts_them(api: Api) -> None:
    rollouts = feed(api, max_staleness=2)
    api.post(20, version=1)
    api.post(22, version=5)
    batch = rollouts.next(6)
    assert trained(batch) == [22, 23]
    numbers = reduce(batch.metrics)
    assert numbers["rollout/dropped_stale_groups"] == 1 and numbers["rollout/staleness_max"] == 1
    assert first_tokens(batch) == [22], "samples are chosen from what is trained on"
    sample = batch.rollouts.groups[0].samples[1]
    assert sample.tokens_T.tolist() == [1, 2, 23] and sample.positions.tolist() == [2]
    assert sample.reward == 1.0 and sample.version == 5 and sample.temperature == 1.0
    assert sample.rollout_logprobs is not None and sample.rollout_logprobs.tolist() == [-0.25]
    finish(rollouts, batch, 1)
    api.post(30, 32, version=1)
    api.post(34, 36, version=6)
    assert first_tokens(rollouts.next(6)) == [34, 36]  # a batch that was stale as a whole made way
    assert status(api)["current_step"] == 1  # and was no step


def test_an_api_that_comes_back_is_waited_for(api: Api) -> None:
    rollouts = feed(api)
    api.post(40, 42)
    batch = rollouts.next(0)
    api.stop()
    api.start()
    finish(rollouts, batch, 1)
    api.post(44, 46)
    assert first_tokens(rollouts.next(0)) == [44, 46]


def test_an_api_that_forgot_the_trainer_is_registered_with_anew(tmp_path: Path) -> None:
    api = Api(log=tmp_path / "api.log")
    api.start()
    try:
        rollouts = feed(api)
        api.post(50, 52)
        finish(rollouts, rollouts.next(0), 3)
        api.stop()
        api.start()
        api.post(54, 56)
        assert first_tokens(rollouts.next(0)) == [54, 56]
        assert status(api)["current_step"] == 3
    finally:
        api.stop()


def test_the_wait_for_a_batch_ends_with_the_apis_own_explanation(api: Api) -> None:
    rollouts = feed(api, rollout_timeout=1)
    api.post(60)
    with refusing(TrainingError, "--rollout-timeout", words=[f"{api.url}/status"]):
        rollouts.next(0)


def test_a_stop_ends_the_wait(api: Api) -> None:
    def stop() -> None:
        raise StoppedError(signal.SIGINT)

    rollouts = feed(api, check_stop=stop)
    with pytest.raises(StoppedError):
        rollouts.next(0)


def test_client_tells_a_server_that_is_no_rollout_api() -> None:
    with answering(lambda _: Reply(501, content=b"<html>Unsupported method</html>")) as url:
        config = RolloutConfig(atropos_url=url, rollout_timeout=1)
        with refusing(ServerError, f"POST {url}/register") as refused:
            RolloutClient(config, registration(BATCH, **RUN), lambda: None).register()
        assert refused.value.got.startswith("501 ")


def test_a_trainer_that_was_taken_over_ends_with_that_word(api: Api) -> None:
    first = feed(api)
    api.post(70, 72)
    batch = first.next(0)
    second = feed(api)
    assert first_tokens(second.next(0)) == [70, 72]  # the first one's lease went back
    for call in (lambda: finish(first, batch, 1), lambda: first.next(1)):
        with refusing(TrainingError, f"--rollout-url {api.url}") as ended:
            call()
        assert ended.value.got.isprintable() and ended.value.got.isascii(), "the API's words, and no MessagePack"
        assert not ended.value.got.startswith(("{", "b'"))


def test_a_trained_batch_stays_leased_until_it_is_settled_and_moves_the_step_before(api: Api) -> None:
    """A crash of the API changes none of it. Environments then learn which groups are not trained yet."""
    first = feed(api)
    api.post(10, 12, 14, 16)
    batch = first.next(0)
    assert first.trained(batch) == (batch.rollouts.batch_id,)
    first.next(0)
    env_id = post(api, "/register-env", desired_name="sums", **ENVIRONMENT)["env_id"]
    first.report(1)
    api.kill()
    api.start()
    assert status(api)["current_step"] == 1 and status(api)["leased_groups"] == 4
    told = httpx.get(f"{api.url}/status-env?env_id={env_id}&wait=0", trust_env=False).json()
    assert told["leased"] == 2
    resumed = feed(api)  # another process, which knows of no checkpoint
    assert first_tokens(resumed.next(0)) == [10, 12]
    assert status(api)["current_step"] == 0


def test_what_a_checkpoint_holds_is_settled_by_who_resumes_it(api: Api) -> None:
    killed = feed(api)
    api.post(10, 12, 14, 16, 18, 20)
    killed.trained(killed.next(0))
    done = killed.trained(killed.next(1))
    killed.settle(done[:1])  # killed before it said so of the second
    resumed = feed(api, at=Progress(2, 2, done))
    assert first_tokens(resumed.next(2)) == [18, 20]
    assert status(api)["current_step"] == 2


def test_batches_come_again_as_they_were_whatever_has_arrived_since(api: Api) -> None:
    killed = feed(api)
    api.post(10, sizes=3)
    api.post(20, 22)
    assert first_tokens(killed.next(0)) == [20, 22]  # 3 + 2 > 4
    api.post(30, sizes=1)
    resumed = feed(api)
    assert first_tokens(resumed.next(0)) == [20, 22]  # though the oldest set that fits is now 3 + 1
    assert first_tokens(resumed.next(0)) == [10, 30]


def test_a_lease_is_kept_for_as_long_as_training_takes(api: Api) -> None:
    rollouts = feed(api, lease_seconds=1.0)
    api.post(10, 12)
    batch = rollouts.next(0)
    answered = threading.Event()
    answered.wait(2.5)
    assert status(api)["leased_groups"] == 2
    finish(rollouts, batch, 1)
    assert status(api)["leased_groups"] == 0 and status(api)["queue_size"] == 0


def test_a_trainer_out_of_reach_for_longer_than_its_leases_goes_on_and_gets_nothing_twice(api: Api) -> None:
    api.post(10, 12, 14, 16, 18, 20)
    with feed(api, prefetch=True, lease_seconds=0.2) as rollouts:
        first = rollouts.next(0)
        wait_for("the next batch is leased", lambda: len(status(api)["leases"]) == 2, api.log, 20)
        rollouts.client.let_leases_run_out()  # as if the network were cut
        wait_for("both are overdue", lambda: all(x["expires_in_s"] < -1 for x in status(api)["leases"]), api.log, 20)
        finish(rollouts, first, 1)
        second = rollouts.next(1)
        assert first_tokens(second) == [14, 16]
        finish(rollouts, second, 2)
        third = rollouts.next(2, last=True)  # it was fetched ahead while the second one was overdue
        assert first_tokens(third) == [18, 20]
    assert status(api)["current_step"] == 2


def test_client_batch_of_somebody_else_by_now(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    rollouts = feed(api)
    client = rollouts.client
    api.post(10, 12)
    nameless = httpx.get(api.url + "/batch?lease=0.1", trust_env=False).json()["batch_id"]
    wait_for("it has run out", lambda: not status(api)["leases"], api.log, 20)
    again = rollouts.next(0)
    assert first_tokens(again) == [10, 12]
    for call in ("extend?lease=1", "ack"):
        refused = httpx.post(f"{api.url}/batch/{nameless}/{call}", trust_env=False)
        assert (refused.status_code, refused.json()["reason"]) == (409, "expired")
    client.settle([nameless])
    assert [record.levelname for record in caplog.records if nameless in str(record.args)] == ["WARNING"]


def test_feed_fetches_one_batch_ahead_and_gives_it_back_in_the_end(api: Api) -> None:
    api.post(10, 12, 14, 16, 18, 20)
    with feed(api, prefetch=True) as rollouts:
        assert first_tokens(rollouts.next(0)) == [10, 12]
        wait_for("the next batch is leased", lambda: len(status(api)["leases"]) == 2, api.log, 20)
        assert first_tokens(rollouts.next(1)) == [14, 16]
        wait_for("and the next", lambda: len(status(api)["leases"]) == 3, api.log, 20)
    assert len(status(api)["leases"]) == 2  # those that were taken
    assert first_tokens(feed(api).next(0)) == [10, 12]
    for staleness, last in ((None, True), (0, False)):  # nothing ahead: its last batch; on policy
        with feed(api, prefetch=True, max_staleness=staleness) as rollouts:
            rollouts.next(0, last=last)
            assert len(status(api)["leases"]) == 1


def test_evaluations_come_once_to_the_trainer_that_asked_for_them(api: Api) -> None:
    rollouts = feed(api)
    api.post(10, 12, 14, 16)
    first = rollouts.next(0)
    answered = post(api, "/register-env", desired_name="sums", **ENVIRONMENT)
    assert answered["eval_every"] == 5
    post(api, "/evaluation", env_id=answered["env_id"], step=7, metrics={"accuracy": 0.5, "samples": 96})
    rollouts.trained(first)
    assert reduce(rollouts.report(1)) == {"eval/sums_0/accuracy": 0.5, "eval/sums_0/samples": 96, "eval/sums_0/step": 7}
    rollouts.trained(rollouts.next(1))
    assert not rollouts.report(2)
    resumed = feed(api)
    resumed.trained(resumed.next(1))
    assert not resumed.report(2)  # they were the former trainer's
    refused = httpx.post(api.url + "/evaluation", json={"env_id": 99, "step": 1, "metrics": {}}, trust_env=False)
    assert refused.status_code == 404 and refused.json()["field"] == "env_id" and "99" in refused.json()["detail"]


def test_report_last_step_waits_for_followers(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    """Others, such as those of Atropos, never leave. A signal ends the wait, and the run ends with its last row."""
    stopped = threading.Event()

    def check_stop() -> None:
        if stopped.is_set():
            raise StoppedError(signal.SIGINT)

    def follow() -> int:
        env_id = post(api, "/register-env", desired_name="own", **ENVIRONMENT)["env_id"]
        httpx.get(f"{api.url}/status-env?env_id={env_id}&wait=0", trust_env=False).raise_for_status()
        return env_id

    rollouts = feed(api, check_stop=check_stop, eval_every=1)
    api.post(10, 12)
    rollouts.trained(rollouts.next(0))
    post(api, "/register-env", desired_name="foreign", **ENVIRONMENT)
    own = follow()
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO):
        reported = pool.submit(rollouts.report, 1, last=True)
        wait_for("the trainer waits", lambda: "the last evaluation of own_0" in caplog.text, api.log)
        assert not reported.done()
        post(api, "/evaluation", env_id=own, step=1, metrics={"accuracy": 0.5})
        post(api, "/disconnect-env", env_id=own)
        found = reduce(reported.result(20))
        assert found.pop("train/evaluation_time") > 0 and found == {"eval/own_0/accuracy": 0.5, "eval/own_0/step": 1}

        follow()
        caplog.clear()
        reported = pool.submit(rollouts.report, 1, last=True)
        wait_for("the trainer waits", lambda: "the last evaluation of own_0" in caplog.text, api.log)
        stopped.set()
        assert reported.result(20).keys() == {"train/evaluation_time"}


def test_a_status_that_does_not_come_ends_no_wait_for_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"env_id": 0, "name": "own_0", "group_size": 2, "weight": 1.0, "connected": True, "alive": True}
    env |= {"reserved": 0, "idle_s": 0.0, "queued_groups": 0, "queued_sequences": 0, "buffered_sequences": 0}
    there = {"current_step": 1, "queue_size": 0, "environments": [env | {"received_groups": 0, "follows": True}]}
    answers: list[Any] = [there, httpx.ReadTimeout("busy"), there, {"current_step": 1, "queue_size": 0}]

    def answer(request: httpx.Request) -> httpx.Response:
        said = answers.pop(0)
        if isinstance(said, Exception):
            raise said
        return httpx.Response(200, json=said)

    client = RolloutClient(RolloutConfig(atropos_url="http://api"), registration(BATCH, **RUN), do_nothing)
    with httpx.Client(base_url="http://api", transport=httpx.MockTransport(answer)) as http:
        monkeypatch.setattr(client, "_http", http)
        client.wait_until_alone(60)
    assert not answers


@pytest.mark.complete
def test_hundreds_of_batches_wait_for_a_checkpoint_and_come_again_in_their_order(api: Api) -> None:
    """As many as steps may lie between two checkpoints; a trainer that is killed before the second gets them again."""
    count = 300
    api.post(*range(0, 4 * count, 2))

    def take_all(rollouts: Any) -> list[list[int]]:
        taken = []
        for step in range(1, count + 1):
            taken.append(first_tokens(batch := rollouts.next(0, last=True)))
            rollouts.trained(batch)
            rollouts.report(step)
        return taken

    taken = take_all(feed(api))
    assert len(status(api)["leases"]) == count
    api.kill()
    api.start()
    rollouts = feed(api)
    client = rollouts.client
    assert take_all(rollouts) == taken == [[value, value + 2] for value in range(0, 4 * count, 4)]
    rollouts.settle(client.unsettled)
    assert (status(api)["leases"], status(api)["queue_size"], client.unsettled) == ([], 0, ())
