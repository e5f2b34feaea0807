"""The serve loop against the real rollout API in this process: what it delivers, how far ahead it runs, how it ends."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import numpy as np
import pytest

from environments.api import wire
from environments.api.service import Service
from environments.api.settings import Settings
from environments.base import BaseEnv
from environments.config import BaseEnvConfig, ConfigError, PromptTooLong
from environments.demo_model.model import build_tokenizer
from environments.items import Shuffled
from environments.peers.http import PeerError
from environments.running import groups, runner
from environments.running.cli import evaluate, process
from environments.running.groups import EnvironmentFailed, GroupTimeout, Unwritable
from environments.running.metrics import Reporter, open_lines
from environments.scoring import ScoreTimeout, Scoring
from tests.stand_ins import LocalApi, local_api, registration, serving, trained
from tests.unit.factories import refusing

TRAINER = registration(8)


def config(**changes: Any) -> BaseEnvConfig:
    given = {"tokenizer_name": "model", "group_size": 2, "retry_timeout": 30.0, "max_batches_offpolicy": 1}
    return BaseEnvConfig(**(given | changes))


def group(
    scores: tuple[float, ...] = (1.0, 0.0), length: int = 3, version: int = 0, *, trained: bool = True
) -> wire.ScoredData:
    return wire.ScoredData(
        tokens=[list(range(length)) for _ in scores],
        masks=[[-100, *(range(1, length) if trained else [-100] * (length - 1))] for _ in scores],
        scores=list(scores),
        inference_logprobs=[[1.0] + [-0.5] * (length - 1) for _ in scores],
        policy_versions=[version] * len(scores),
    )


TOKENIZER = build_tokenizer()


class Sums(BaseEnv[int]):
    """Delivers groups without a server; each test says what an item turns into, and what an evaluation finds."""

    name = "sums"

    def __init__(
        self,
        settings: BaseEnvConfig,
        collect: Callable[[int], Awaitable[wire.ScoredData | None]],
        found: Callable[["Sums"], Awaitable[dict[str, Any]]] | None = None,
    ) -> None:
        super().__init__(settings, None, TOKENIZER)  # type: ignore[arg-type]
        self.collect, self.found = collect, found
        self.items = iter(range(1, 10_000))
        self.evaluated_at: list[int] = []  # the trainer's step at each evaluation

    async def collect_trajectories(self, item: int) -> wire.ScoredData | None:
        return await self.collect(item)

    async def evaluate(self) -> dict[str, Any]:
        self.evaluated_at.append(self.curr_step)
        return {"accuracy": 0.5} if self.found is None else await self.found(self)


async def plain(item: int) -> wire.ScoredData:
    return group(version=item)


async def started(trainer: wire.Register = TRAINER) -> Service:
    """An API whose trainer has asked for its first batch."""
    service = Service(Settings())
    await service.register(trainer)
    await service.next_batch()
    return service


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def train(service: Service, steps: int, environment: asyncio.Task[None] | None = None) -> list[list[int]]:
    """Policy versions of the batches that were trained on."""
    batches = await trained(service, steps, environment)
    return [[versions[0] for one in groups if (versions := one.policy_versions)] for groups in batches]


@asynccontextmanager
async def running(
    env: BaseEnv[Any, Any], served: Service | LocalApi, stop: asyncio.Event | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """An environment that serves, and ends by itself after the block."""
    task = asyncio.create_task(serving(env, served, stop or asyncio.Event()))
    try:
        yield task
        await asyncio.wait_for(task, 60)
    finally:
        task.cancel()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine stalls the rollout API for longer than an environment waits for its goodbye."""
    monkeypatch.setattr(runner, "GOODBYE_S", 60.0)


async def test_runner_delivers_until_the_trainer_has_done_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(Settings())
    with caplog.at_level(logging.INFO):
        async with running(Sums(config(), plain), service):
            await asyncio.sleep(0.05)  # the environment is there first, and waits
            await service.register(TRAINER)
            taken = await train(service, steps=3)
    assert not service.status().environments[0].connected
    # None lost, none twice, and no batch before the one before it was taken.
    assert [sorted(batch) for batch in taken] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert "3 steps" in caplog.text
    assert re.search(r"\b4 groups .*\b0\.500, 2\.0 tokens", caplog.text)


async def test_runner_ends_where_state_exits(tmp_path: Path) -> None:
    class Exits(Sums):
        def state(self) -> dict[str, Any]:
            raise SystemExit(3)

    service = await started(msgspec.structs.replace(TRAINER, save_checkpoint_interval=1))
    with pytest.raises(RuntimeError, match="SystemExit"):
        async with running(Exits(config(state_dir=tmp_path), plain), service) as environment:
            await train(service, 2, environment)
            await until(environment.done)


def test_a_state_is_found_by_a_checkpoint_whose_step_the_environment_missed(tmp_path: Path) -> None:
    counts = dict.fromkeys(("queue_size", "unallocated_fraction", "self_queue_size", "max_group_size", "env_weight"), 1)
    statuses = [msgspec.convert(counts | {"current_step": step}, wire.StatusEnv) for step in (19, 21, 31)]
    env, api = Sums(config(state_dir=tmp_path), plain), AsyncMock(**{"status.return_value": statuses.pop()})
    made = runner.Runner(env, api)
    made._registration = wire.RegisterEnvResponse(status="success", env_id=0, checkpoint_interval=10)
    for status in statuses:
        env.state = lambda step=status.current_step: {"step": step}
        made._take(status)
    asyncio.run(made._disconnect())
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == ["step-20.json", "step-30.json", "step-31.json"]


@pytest.mark.parametrize("stuck", [False, True])
async def test_runner_says_what_is_missing(
    stuck: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SAY_WAITING_EVERY_S", 0.2)
    monkeypatch.setattr(runner, "WAIT_S", 0.1)
    missing, stop = "groups in flight" if stuck else "the trainer", asyncio.Event()

    async def make(item: int) -> wire.ScoredData:
        await asyncio.sleep(600.0 if stuck else 0.0)
        return group(version=item)

    with caplog.at_level(logging.WARNING, logger=runner.__name__):
        async with running(Sums(config(), make), await started(), stop):
            await until(lambda: any(missing in (record.args or ()) for record in caplog.records))
            stop.set()


async def test_runner_slow_group_keeps_no_others_from_starting() -> None:
    """A place comes free with each group that is posted, and not only when the trainer takes the batch."""
    stop, goes_on, begun = asyncio.Event(), asyncio.Event(), list[int]()

    async def slow(item: int) -> wire.ScoredData:
        begun.append(item)
        if item == 4:
            await goes_on.wait()
        return group(version=item)

    async with running(Sums(config(max_batches_offpolicy=None), slow), await started(), stop):
        await until(lambda: 5 in begun)
        goes_on.set()
        stop.set()


async def test_runner_loses_no_group_while_the_api_is_away(caplog: pytest.LogCaptureFixture) -> None:
    def waits() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "environments.peers.http"]

    service, cut = await started(), asyncio.Event()

    async def cutting(item: int) -> wire.ScoredData:
        if item == 2:
            cut.set()
        return group(version=item)

    with caplog.at_level(logging.INFO):
        async with local_api(service) as api, running(Sums(config(), cutting), api) as task:
            await cut.wait()
            await api.stop()
            await until(lambda: bool(waits()))
            await api.start()
            taken = await train(service, steps=3, environment=task)
    # Posts that were repeated may come after others, but each comes once.
    assert sorted(version for batch in taken for version in batch) == list(range(1, 13))
    assert waits()[0].levelno == logging.INFO and "the rollout API" in waits()[0].message


async def test_runner_follows_an_api_that_begins_anew_and_a_trainer_that_takes_over() -> None:
    old, new, env = await started(), Service(Settings()), Sums(config(), plain)
    async with local_api(old) as api, running(env, api), asyncio.timeout(60):
        await until(lambda: old.status().queue_size == 4)
        await api.exchange(new)
        await new.register(TRAINER)
        taken = await train(new, steps=1)
        await new.register(registration(16, starting_step=1, num_steps=4, eval_every=4))
        taken += await train(new, steps=3)
    assert [len(batch) for batch in taken] == [4, 8, 8, 8]
    assert (env.num_steps, env.evaluated_at, len(new.status().environments)) == (4, [4], 1)
    assert sorted(version for batch in taken for version in batch) == list(range(5, 33))


@pytest.mark.parametrize("away", [False, True])
async def test_runner_stops_when_asked(
    away: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hands over what is scored; where nobody answers any more it stops without."""
    if away:
        monkeypatch.setattr(runner, "GOODBYE_S", 0.8)
    service, stop = await started(), asyncio.Event()

    async def one_in_two(item: int) -> wire.ScoredData:
        if item % 2 and not away:
            await asyncio.Event().wait()  # generates for ever
        return group()

    async with local_api(service) as api, running(Sums(config(), one_in_two), api, stop):
        await until(lambda: service.status().queue_size == (4 if away else 2))
        if away:
            await api.stop()
        stop.set()
    assert service.status().environments[0].connected == away
    assert away or not [record for record in caplog.records if record.levelno >= logging.WARNING]  # nothing was lost


async def test_code_that_ignores_its_cancellation_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("GRACE_S", "GOODBYE_S"):
        monkeypatch.setattr(runner, name, 0.05)
    over, stop = asyncio.Event(), asyncio.Event()

    async def clings(env: Sums) -> dict[str, Any]:
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()
        return {}

    env = Sums(config(), plain, clings)
    stopped = asyncio.create_task(runner.until(stop, evaluate(env)))
    await until(lambda: env.evaluated_at != [])
    stop.set()
    assert not await stopped
    left = asyncio.create_task(env.evaluate())
    await asyncio.sleep(0)
    await runner._cancel([left])
    assert not left.done() and [each.levelno for each in caplog.records if each.levelno > logging.INFO] == [30, 30]
    over.set()
    await left


async def test_runner_ends_with_its_items() -> None:
    service, env = await started(), Sums(config(), plain)
    env.items = iter(range(3))
    async with running(env, service):
        pass
    assert service.status().queue_size == 3


async def test_runner_goes_on_after_an_evaluation_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def fails_once(env: Sums) -> dict[str, float]:
        if len(env.evaluated_at) == 1:
            raise ValueError("a bug of the environment")
        return {"accuracy": 0.5}

    service, env = await started(), Sums(config(steps_per_eval=1), plain, fails_once)
    async with running(env, service):
        for count in range(1, 3):
            await train(service, steps=1)
            await until(lambda count=count: len(env.evaluated_at) == count)
        await train(service, steps=1)
    assert [each.step for each in service.evaluations] == [2, 3]
    (failed,) = [record for record in caplog.records if record.exc_info]
    assert failed.args == (1,) and failed.exc_info is not None and failed.exc_info[0] is ValueError


@dataclass(frozen=True)
class Loss:
    """What goes wrong with an item."""

    make: Callable[[Sums], Awaitable[wire.ScoredData | None]]
    said: str  # of items 2 and 3, in the log
    got: str | None  # of the error if it goes wrong with every item; None: the environment goes on


async def too_long(env: Sums) -> wire.ScoredData | None:
    env.check_room([1] * 999)


async def no_reward(env: Sums) -> wire.ScoredData | None:
    raise ZeroDivisionError("no reward")


async def cancels(env: Sums) -> wire.ScoredData | None:
    task = asyncio.create_task(asyncio.Event().wait())
    task.cancel()
    await task


async def exits(env: Sums) -> wire.ScoredData | None:
    async def score() -> None:
        raise SystemExit(3)

    await asyncio.gather(score())  # gather() runs score() in a task, as verifiers runs a reward


async def hangs(env: Sums) -> wire.ScoredData | None:
    await Scoring(0.05).within("item", asyncio.Event().wait())


async def never_ends(env: Sums) -> wire.ScoredData | None:
    await asyncio.Event().wait()


def made(one: wire.ScoredData | None) -> Callable[[Sums], Awaitable[wire.ScoredData | None]]:
    async def make(env: Sums) -> wire.ScoredData | None:
        return one

    return make


NEGATIVE = msgspec.structs.replace(group(), tokens=[[1, 2, 3], [1, 2, -3]])
HALF = msgspec.structs.replace(group(), messages=[[{"role": "user", "content": "\ud83d"}], []])
LONG = wire.ScoredData(tokens=[[0, 1, 2], [*range(17)]], masks=[[-100, 1, 2], [-100, *range(1, 17)]], scores=[1.0, 0.0])
LOSSES = {
    "prompt too long": Loss(too_long, groups.LOSSES[PromptTooLong], "--env.max_token_length: got 100,"),
    "error": Loss(no_reward, "ZeroDivisionError", repr(ZeroDivisionError("no reward"))),
    "cancelled": Loss(cancels, "RuntimeError: CancelledError", "CancelledError"),
    "exits": Loss(exits, "RuntimeError: SystemExit: 3", "SystemExit: 3"),
    "hangs": Loss(hangs, groups.LOSSES[ScoreTimeout], "--env.score_timeout: "),
    "never ends": Loss(never_ends, groups.LOSSES[GroupTimeout], "--env.group_timeout: got 0.2 s"),
    "refused by the API": Loss(made(NEGATIVE), "tokens[1][2]", "tokens[1][2]"),
    "nothing to train on": Loss(made(group(trained=False)), "no token", "no token"),
    "too long": Loss(made(LONG), "trainer's 16 tokens", "trainer's 16 tokens"),
    "too many": Loss(made(group((1.0, 0.0, 1.0))), "3 sequences for 2", "3 sequences for 2"),
    "malformed": Loss(made(msgspec.structs.replace(group(), overrides=[{}])), "ValueError", "ValueError"),
    "not finite": Loss(made(group((float("nan"), 0.0))), "not finite", "not finite"),
    "half a character": Loss(made(HALF), groups.LOSSES[Unwritable], "surrogates"),
    "equal scores": Loss(made(group((1.0, 1.0))), "2 dropped (all scores equal)", None),
    "no group": Loss(made(None), f"2 dropped ({groups.NOTHING})", None),
}


async def with_losses(loss: Loss, lost: Callable[[int], bool]) -> None:
    """Serve until three steps are trained; some items are lost."""
    seconds = 0.2 if loss.make is never_ends else 60.0
    env = Sums(config(max_token_length=100, ensure_scores_are_not_same=True, group_timeout=seconds), plain)

    async def collect(item: int) -> wire.ScoredData | None:
        return await loss.make(env) if lost(item) else group(version=item)

    env.collect = collect
    service = await started()
    trainer = asyncio.create_task(train(service, steps=3))
    try:
        async with running(env, service):
            pass
    finally:
        trainer.cancel()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
async def test_runner_goes_on_after_items_that_are_lost(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await with_losses(loss, lambda item: item in (2, 3))
    assert loss.said in caplog.text
    shown = [record for record in caplog.records if record.name == groups.__name__]
    assert len([record for record in shown if record.levelno >= logging.WARNING]) == (loss.got is not None)  # once


@pytest.mark.parametrize("loss", [loss for loss in LOSSES.values() if loss.got], ids=lambda loss: loss.got)
async def test_runner_ends_where_every_item_is_lost(loss: Loss) -> None:
    if loss.make is too_long:  # as prompts of large data may be, of which most rows are not checked before the start
        await with_losses(loss, lambda item: item < 900)
    with refusing(EnvironmentFailed, "sums", words=["1000 " if loss.make is too_long else "16 ", str(loss.got)]):
        await with_losses(loss, lambda item: True)


@pytest.mark.parametrize("method", ["setup", "get_next_item", "evaluate"])
async def test_a_cancellation_that_the_code_raises_itself_is_no_end_of_the_work(method: str) -> None:
    async def raises() -> None:
        raise asyncio.CancelledError

    with pytest.raises((EnvironmentFailed, RuntimeError), match="CancelledError"):
        env = Sums(config(), plain)
        setattr(env, method, raises)
        await (runner.until(asyncio.Event(), evaluate(env)) if method == "evaluate" else serving(env, await started()))


@pytest.mark.parametrize(("is_broken", "written"), [(lambda item: item % 2 == 0, 40), (lambda item: item > 8, 8)])
async def test_process_writes_each_group_that_is_made(
    is_broken: Callable[[int], bool], written: int, tmp_path: Path
) -> None:
    async def collect(item: int) -> wire.ScoredData:
        if is_broken(item):
            return HALF
        return group()

    path = tmp_path / "groups.jsonl"
    with nullcontext() if written == 40 else pytest.raises(EnvironmentFailed):
        await process(Sums(config(data_path_to_save_groups=path), collect), 40)
    assert len(path.read_bytes().splitlines()) == written
    env = Sums(config(data_path_to_save_groups=tmp_path / "few.jsonl"), plain)
    env.items = iter(range(3))
    with refusing(PeerError, "sums", got="3 groups", wanted="4 groups"):
        await process(env, 4)
    assert len((tmp_path / "few.jsonl").read_bytes().splitlines()) == 3


@pytest.mark.parametrize(("items", "warns"), [(3, True), (4, False)])
async def test_runner_warns_of_fewer_items_than_a_step_has_groups(
    items: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    service, env = await started(), Sums(config(), plain)
    env.items = Shuffled(range(items), 0)
    async with running(env, service):
        await train(service, steps=3)
    assert [record.args for record in caplog.records if record.levelno == logging.WARNING] == [(4, items)] * warns


async def test_a_group_larger_than_the_batch_is_refused() -> None:
    with refusing(ConfigError, "--env.group_size", got="16", words=["8 sequences"]):
        await serving(Sums(config(group_size=16), plain), await started())


@pytest.mark.parametrize(
    "fields",
    [{"generation_params": {"top_p": 0.9}}, {"overrides": [{}, {"top_k": 5}]}, {"group_overrides": {"min_p": 0.1}}],
)
async def test_groups_sampled_from_a_part_of_the_vocabulary_end_it(fields: dict[str, Any]) -> None:
    async def cut(item: int) -> wire.ScoredData:
        return msgspec.structs.replace(group(), **fields)

    service = await started()
    with pytest.raises(ConfigError) as error:
        await serving(Sums(config(), cut), service)
    assert error.value.field.startswith("sums: ") and error.value.got in ("top_p=0.9", "top_k=5", "min_p=0.1")
    assert not service.queue.line


async def test_runner_evaluates_the_last_step_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the evaluation before still runs; meanwhile the API hears of it."""
    monkeypatch.setattr(runner, "HEARD_EVERY_S", 0.05)
    service, may_end = await started(), asyncio.Event()

    async def slow(env: Sums) -> dict[str, float]:
        await may_end.wait()
        return {"accuracy": 0.5}

    env = Sums(config(steps_per_eval=1), plain, slow)
    async with running(env, service):
        await train(service, steps=1)
        await until(lambda: env.evaluated_at == [1])
        await train(service, steps=2)
        heard = service.queue.environments[0].heard
        await until(lambda: service.queue.environments[0].heard > heard)
        (environment,) = service.status().environments
        assert environment.connected and environment.follows
        may_end.set()
    assert [each.step for each in service.evaluations] == [1, 3]


@pytest.mark.parametrize(("by_trainer", "is_empty"), [(False, False), (True, False), (True, True)])
async def test_runner_evaluates_by_steps_and_warns_once_that_there_is_nothing_to_evaluate(
    by_trainer: bool, is_empty: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def found(env: Sums) -> dict[str, Any]:
        return {} if is_empty else {"accuracy": np.float32(0.5)}  # which JSON does not know

    every, said = (1, "evaluation at step") if is_empty else (2, "step")
    service = await started(msgspec.structs.replace(TRAINER, eval_every=every) if by_trainer else TRAINER)
    settings = config(steps_per_eval=0 if by_trainer else every, metrics_path=tmp_path / "metrics.jsonl")
    with caplog.at_level(logging.INFO):
        async with running(Sums(settings, plain, found), service):
            for step in range(3):
                await train(service, steps=1)
                await until(lambda step=step: f"{said} {step + 1}:" in caplog.text)
    assert [Sums.no_evaluation in (record.args or ()) for record in caplog.records].count(True) == is_empty
    if not is_empty:
        (evaluation,) = service.evaluations_after(0).evaluations
        assert (evaluation.step, evaluation.metrics["accuracy"]) == (2, 0.5)
        assert b'"sums_0/eval/accuracy": 0.5}' in (tmp_path / "metrics.jsonl").read_bytes()


async def test_runner_drops_groups_without_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "UNSCORED_IN_A_ROW", 20)  # more than LOST_IN_A_ROW: such groups are not lost
    marked, rare, service = group(trained=False), True, await started()
    marked = msgspec.structs.replace(marked, overrides=[{"unscored": True}] * 2)

    async def collect(item: int) -> wire.ScoredData:
        return group(version=item) if rare and item % 20 == 0 else marked

    with pytest.raises(EnvironmentFailed) as caught:
        async with running(Sums(config(), collect), service):
            assert await train(service, steps=1)
            rare = False
    assert "None" in caught.value.got


def test_reporter_metrics_are_of_one_step(tmp_path: Path) -> None:
    reporter = Reporter("sums_0")
    reporter.file = open_lines("--env.metrics_path", tmp_path / "metrics.jsonl")
    reporter.add(group((1.0, 0.0), length=2, version=3))
    reporter.add(group((1.0, 1.0), length=4, version=4))
    reporter.dropped["all scores equal"] += 2
    # groups, mean score, mean length, oldest and newest version, groups dropped
    assert re.findall(r"[\d.]+", reporter.line({})) == ["2", "0.750", "2.0", "3", "4", "2"]
    reporter.end_step(7, {})
    reporter.end_step(8, {"strict": 0.5})
    reporter.file.close()
    # scores (1 + 0 + 1 + 1) / 4, lengths (1 + 1 + 3 + 3) / 4
    first = {"step": 7, "groups_sent": 2, "groups_dropped": 2, "groups_dropped/all scores equal": 2}
    first |= {"score_mean": 0.75, "completion_length_mean": 2.0, "policy_version_oldest": 3}
    second = {"step": 8, "groups_sent": 0, "groups_dropped": 0, "strict": 0.5}
    lines = (tmp_path / "metrics.jsonl").read_text().replace("sums_0/", "").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row | figures == row for row, figures in zip(rows, (first, second), strict=True)] == [True, True]
    assert "score_mean" not in rows[1]
