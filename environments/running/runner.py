"""``serve``: supply the trainer with groups, with a limit on how far ahead of it they are."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from environments.api import wire
from environments.config import BaseEnvConfig, ConfigError, PromptRefused, PromptTooLong, UnusableRow
from environments.peers.http import PeerError, PeerRefused
from environments.peers.rollout_api import NotRegistered, RolloutApi
from environments.running.data_record import keep
from environments.running.files import JsonlFile
from environments.running.metrics import JsonlSink, Reporter, Sink, open_wandb
from environments.running.pace import InFlight, Registration, RunningShare, groups_to_start
from environments.running.state import FOLDER, StateFiles
from environments.scoring import ScoreTimeout
from environments.threads import settled
from environments.trajectory import check_sampled_from_all, trained_tokens, truncated_of
from grpo_common.errors import UserError
from grpo_common.status import WAITS
from grpo_common.trace import lane, stage

if TYPE_CHECKING:
    from environments.base import BaseEnv

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between status requests to an API that does not support waiting for changes."""
WAIT_S = 20.0
"""Seconds that an API with such support may hold a status request."""
REGISTER_AGAIN_S = 0.25
SAY_WAITING_EVERY_S = 60.0
HEARD_EVERY_S = 10.0
"""Seconds between status requests during the last evaluation."""
GOODBYE_S = 0.8
"""Shutdown limits in seconds: for posting groups that are already scored, and then for disconnecting."""
LOST_IN_A_ROW = 16
"""After this many lost groups in a row, the environment counts as broken."""

LOSSES = {
    PeerRefused: "refused by the server",
    PromptTooLong: "prompt too long",
    PromptRefused: "prompt refused by the chat template",
    ScoreTimeout: "scored for too long",
    UnusableRow: "unusable row",
}
"""Errors that lose one group, and the reason under which it is counted."""
ALL_EQUAL = "all scores equal"
ALL_UNSCORED = "no reward applies"
UNSCORED_IN_A_ROW = 256
"""After this many groups in a row to which no reward applies, the environment counts as broken."""

Tasks = dict[asyncio.Task[None], int]
"""Maps each task to the trainer's step when its group was started."""


class EnvironmentFailed(PeerError):
    """The environment's code fails for one group after another."""


def unfit(group: wire.ScoredData, config: BaseEnvConfig, max_token_len: int) -> str | None:
    """Return why a group must not be sent; None if it may be."""
    expected = (group.group_overrides or {}).get("group_size", config.group_size)
    if len(group.tokens) != expected:
        return f"{len(group.tokens)} sequences for {expected}"
    if all(entry == wire.IGNORED for mask in group.masks for entry in mask):
        if not wire.counted_scores(group):
            return ALL_UNSCORED
        if not all(truncated_of(group)):
            return "no token to train on: all completions are empty"
    if not all(map(math.isfinite, group.scores)):
        return "a score that is not finite"
    if config.ensure_scores_are_not_same and len(set(wire.counted_scores(group))) == 1:
        return ALL_EQUAL
    if max_token_len > 0 and max(map(len, group.tokens)) > max_token_len:
        return f"longer than the trainer's {max_token_len} tokens"
    return None


class Losses:
    """Groups in a row that were lost, or to which no reward applies. Many of them end an environment.

    Lost are groups that the environment, or what it asks, could not make. Dropped ones (all scores equal) are not lost:
    the task may be too easy or too hard, but the environment works.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lost = self._unscored = 0

    def judged(self, reason: str | None) -> bool:
        """Count a scored group, and return whether it is lost.

        Args:
            reason: why it must not be sent, see `unfit`.

        Raises:
            EnvironmentFailed: No reward applied to one group after another.
        """
        self._unscored = self._unscored + 1 if reason == ALL_UNSCORED else 0
        if self._unscored >= UNSCORED_IN_A_ROW:
            raise EnvironmentFailed(
                f"no reward applies to any answer of {self._unscored} groups in a row",
                field=self._name,
                got="None for every score",
                wanted="numbers",
                fix="look for a score that returns nothing, and for columns that it misses",
            )
        return reason not in (None, ALL_EQUAL, ALL_UNSCORED)

    def lose(self, trouble: object) -> None:
        """Count a lost group.

        Raises:
            EnvironmentFailed: One group after another was lost.
        """
        self._lost += 1
        if self._lost >= LOST_IN_A_ROW:
            raise EnvironmentFailed(f"{self._lost} groups in a row were lost", field=self._name, got=trouble)

    def used(self) -> None:
        """Begin to count again: a group was used."""
        self._lost = 0


class Failures:
    """Logs each distinct error of an environment's code once, with its traceback; the same line raises the same error.

    The tally counts them all. A `UserError` says where its cause is, so it has no traceback.
    """

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def log(self, name: str, item: object, error: Exception) -> None:
        """Log an error, unless its kind is known."""
        if isinstance(error, UserError):
            key = (type(error).__name__, error.field, error.summary, error.wanted)
        else:
            last = traceback.extract_tb(error.__traceback__)[-1:]
            key = (type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in last))
        if key in self._known:
            return
        self._known.add(key)
        if isinstance(error, UserError):
            log.warning("%s failed for %.200r: %s", name, item, error)
        else:
            log.error("%s failed for %.200r (logged once for each error)", name, item, exc_info=error)


async def set_up(env: BaseEnv[Any, Any]) -> None:
    """Call `setup`. It has no time limit, because it may load for minutes."""
    with env.scoring.loop.patience():
        await settled(env.setup())


async def next_item(env: BaseEnv[Any, Any]) -> Any:
    """Return the next item; None if there are no more.

    Raises:
        ScoreTimeout: It took too long.
    """
    return await env.scoring.call("get_next_item()", settled(env.get_next_item()))


async def scored(env: BaseEnv[Any, Any], item: Any) -> wire.ScoredData | None:
    """Return the item's group for the trainer, or None if there is none.

    Raises:
        ScoreTimeout: It took too long.
    """
    return await env.scoring.call("collect_trajectories()", env.scored(item))


async def serve(env: BaseEnv[Any, Any], api: RolloutApi, stop: asyncio.Event) -> None:
    """Serve until the trainer has done its steps, there are no more items, or `stop` is set.

    Raises:
        ConfigError: The settings do not fit the trainer's.
        PeerError: The API or the server is gone or refuses, or the environment fails for every item.
    """
    await until(stop, Runner(env, api).run())


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, unless `stop` is set before it is done; return whether it was done."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:  # also after an interrupt: the environment disconnects before its connections close
        stopped.cancel()
        if not task.done():
            log.info("stop requested")
            if not task.cancelling():
                task.cancel()
            await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return not task.cancelled()


class Runner:
    """Runs one environment for one trainer."""

    def __init__(self, env: BaseEnv[Any, Any], api: RolloutApi) -> None:
        """Prepare the state; `run` starts the work."""
        self.env = env
        self.config: BaseEnvConfig = env.config
        self.api = api
        self.reporter = Reporter(env.name)
        self._registration: Registration | None = None
        self._generating: Tasks = {}
        self._posting: Tasks = {}
        self._running = RunningShare()
        self._evaluation: asyncio.Task[None] | None = None
        path = self.config.data_path_to_save_groups
        self._file = JsonlFile("--env.data_path_to_save_groups", path) if path else None
        self._losses = Losses(env.name)
        self._failures = Failures()
        self._started = 0
        self._failure: Exception | None = None
        self._items_left = True
        self._woken = asyncio.Event()
        self._news: asyncio.Task[wire.StatusEnv] | None = None
        self._seen: wire.StatusEnv | None = None
        self._moved_at = time.monotonic()

    async def run(self) -> None:
        """Set up, register and work; disconnect at the end, also after an error."""
        try:
            await set_up(self.env)
            if self.config.data_record is not None and (data := self.env.data_sets()):
                keep(self.config.data_record, data)
            self._registration = await self._register()
            self._restore()
            self.reporter = Reporter(self._registration.name, await self._sinks(self._registration.name))
            await self._work()
        finally:
            await self._leave()

    @property
    def registration(self) -> Registration:
        """The latest registration; the work begins after the first."""
        assert self._registration is not None, "not registered yet"
        return self._registration

    async def _register(self) -> Registration:
        said_at = float("-inf")
        while (answer := await self.api.register(self.env.name)).status != "success":
            if time.monotonic() - said_at >= SAY_WAITING_EVERY_S:
                said_at = time.monotonic()
                log.info("%s: the rollout API answers, waiting for the trainer", self.env.name)
            await asyncio.sleep(REGISTER_AGAIN_S)
        info = await self.api.info()
        if answer.env_id is None or info.batch_size < 1:
            raise PeerError(
                field="the rollout API",
                got=f"{answer}, {info}",
                wanted="an env_id and a batch size",
                fix="check --env.rollout_server_url",
            )
        if self.config.group_size > info.batch_size:
            raise ConfigError(
                field="--env.group_size",
                got=self.config.group_size,
                wanted=f"at most the trainer's batch of {info.batch_size} sequences",
                fix="lower it, or raise the trainer's batch",
            )
        self.env.num_steps = max(0, answer.num_steps or 0)
        limits = [limit for limit in (self.config.total_steps, answer.num_steps) if limit is not None and limit >= 0]
        registration = Registration(
            env_id=answer.env_id,
            name=answer.wandb_name or self.env.name,
            batch_size=info.batch_size,
            max_token_len=info.max_token_len,
            last_step=min(limits, default=-1),
            first_step=answer.starting_step or 0,
            checkpoint_dir=answer.checkpoint_dir or None,
            checkpoint_interval=max(0, answer.checkpoint_interval or 0),
            eval_every=answer.eval_every or 0,
            max_staleness=answer.max_staleness,
        )
        log.info(
            "registered as %s: batches of %d sequences in groups of %d, step %s of %s",
            registration.name,
            registration.batch_size,
            self.config.group_size,
            answer.starting_step,
            registration.last_step if registration.last_step >= 0 else "any number",
        )
        return registration

    async def _sinks(self, name: str) -> list[Sink]:
        path = self.config.metrics_path
        sinks: list[Sink] = [JsonlSink("--env.metrics_path", path)] if path else []
        if self.config.use_wandb:
            sinks.append(await asyncio.to_thread(open_wandb, self.config, name, await self.api.wandb_info()))
        return sinks

    def _state_files(self) -> StateFiles | None:
        """Return the state files, in the folder of the settings or else in the trainer's checkpoints, if visible."""
        named = self.registration.checkpoint_dir
        checkpoints = Path(named) if named and Path(named).is_dir() else None
        folder = self.config.state_dir or (checkpoints and checkpoints / FOLDER)
        return StateFiles(folder, self.config.wandb_name or self.env.name, checkpoints) if folder else None

    def _restore(self) -> None:
        """Restore the state of a resumed run."""
        files, step = self._state_files(), self.registration.first_step
        if files and step:
            files.newest(step, self.env.restore)

    def _save_state(self, step: int) -> None:
        files = self._state_files()
        if files and (state := self.env.state()):
            files.save(step, state)

    async def _work(self) -> None:
        while not await self._advance():
            await self._until_news()
            if self._failure is not None:
                raise self._failure
        if self._evaluation is not None:
            await self._last_evaluation(self._evaluation)

    async def _last_evaluation(self, evaluation: asyncio.Task[None]) -> None:
        """Wait for it. The trainer waits as long as this environment is heard of, so that the server stays."""
        for task in self._generating:
            task.cancel()
        while not (await asyncio.wait([evaluation], timeout=HEARD_EVERY_S))[0]:
            await self._status()

    async def _advance(self) -> bool:
        """Start the groups that there is room for; return whether there is nothing left to do."""
        self._woken.clear()
        in_flight = self._in_flight()
        status, registration = await self._status(), self.registration
        if status is None:
            self._woken.set()
            return False
        self._notice(status)
        if self._is_last(status):
            log.info("the trainer has done its %d steps", registration.last_step)
            return True
        for _ in range(groups_to_start(status, registration, self.config, in_flight) if self._items_left else 0):
            item = await next_item(self.env)
            if item is None:
                self._items_left = False
                break
            self._start(self._generating, status.current_step, self._collect_in_lane, item, status.current_step)
        if not self._items_left and not self._generating and not self._posting:
            log.info("no more items")
            return True
        if self._items_left and groups_to_start(status, registration, self.config, self._in_flight()):
            self._woken.set()  # groups posted since the status may have been counted twice
        return False

    async def _until_news(self) -> None:
        """Wait until the API reports a change, or a group here has been posted, dropped or lost."""
        if self._woken.is_set() or self._seen is None:
            return
        if self._seen.seen is None:  # an API that answers at once
            await asyncio.sleep(POLL_S)
            return
        if self._news is None:
            asked = self.api.status(self.registration.env_id, wait=WAIT_S, seen=self._seen.seen)
            self._news = asyncio.create_task(asked)
        woken = asyncio.create_task(self._woken.wait())
        await asyncio.wait({self._news, woken}, return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        if self._news.done():
            news, self._news = self._news, None
            with suppress(NotRegistered):  # the next status request registers again
                news.result()

    def _in_flight(self) -> InFlight:
        steps = [*self._generating.values(), *self._posting.values()]
        return InFlight(len(steps), min(steps, default=None), self._running.value)

    async def _status(self) -> wire.StatusEnv | None:
        """Return the API's status, or None if the environment had to register again first."""
        try:
            return await self.api.status(self.registration.env_id)
        except NotRegistered:
            log.warning("the rollout API was restarted: registering again")
            self._registration = await self._register()
            return None

    def _notice(self, status: wire.StatusEnv) -> None:
        """Report a new step, start an evaluation that is due, and warn if nothing changes.

        While one runs, others that fall due are left out; only that of the last step waits for it.
        """
        now, before = time.monotonic(), self._seen
        if before is None or (status.current_step, status.queue_size) != (before.current_step, before.queue_size):
            self._moved_at = now
        elif now - self._moved_at >= SAY_WAITING_EVERY_S:
            self._moved_at = now
            in_flight = len(self._generating) + len(self._posting)
            log.warning(
                "no progress for %.0f s, waiting for %s: the trainer is at step %d, %d groups queued, %d in flight; %s",
                SAY_WAITING_EVERY_S,
                "groups in flight" if in_flight else "the trainer",
                status.current_step,
                status.queue_size,
                in_flight,
                self.reporter.tally.line(),
                extra=WAITS,
            )
        self._seen = status
        if before is None or status.current_step == before.current_step:
            return
        self.env.curr_step = status.current_step
        self.reporter.end_step(status.current_step, self.env.measures.take())
        interval = self.registration.checkpoint_interval
        if interval and status.current_step // interval > before.current_step // interval:
            self._save_state(status.current_step)
        every = self.config.steps_per_eval or self.registration.eval_every
        due = every and status.current_step // every > before.current_step // every
        if due and (self._evaluation is None or self._evaluation.done() or self._is_last(status)):
            self._evaluation = asyncio.create_task(self._evaluate(status.current_step, self._evaluation))

    def _is_last(self, status: wire.StatusEnv) -> bool:
        return 0 <= self.registration.last_step <= status.current_step

    async def _evaluate(self, step: int, before: asyncio.Task[None] | None) -> None:
        """Evaluate and report. A failed evaluation only leaves a gap in a plot, so it does not stop training."""
        if before is not None:
            await before
        try:
            metrics = await self.env.scoring.call("evaluate()", self.env.evaluate())
            log.info("evaluation at step %d: %s", step, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
            self.reporter.record(step, {f"eval/{key}": value for key, value in metrics.items()})
            await self.api.post_evaluation(self.registration.env_id, step, metrics)
        except ScoreTimeout as error:  # its stack is in the log already
            log.warning("the evaluation at step %d failed, training and later evaluations continue: %s", step, error)
        except Exception:
            log.exception("the evaluation at step %d failed; training and later evaluations continue", step)

    async def _collect_in_lane(self, item: object, step: int) -> None:
        self._started += 1
        with lane(f"group {self._started}"):
            await self._collect(item, step)

    async def _collect(self, item: object, step: int) -> None:
        try:
            group = await scored(self.env, item)
        except tuple(LOSSES) as error:
            self._lose(next(said for kind, said in LOSSES.items() if isinstance(error, kind)), error)
            return
        except (PeerError, ConfigError):
            raise
        except Exception as error:  # an error in the environment's code for one item must not end a long run
            self._failures.log(self.env.name, item, error)
            self._lose("failed", error if isinstance(error, UserError) else repr(error), said=True)
            return
        if group is None:
            self._drop("came to nothing")
            return
        check_sampled_from_all(group, self.env.name)
        self._running.add([trained_tokens(mask) for mask in group.masks])
        reason = unfit(group, self.config, self.registration.max_token_len)
        if self._losses.judged(reason):
            self._lose(str(reason), f"a group of {self.env.name} is not sent: {reason}")
        elif reason is not None:
            self._drop(reason)
        else:
            if self._file:
                self._file.write(msgspec.json.encode(group))
            self._start(self._posting, step, self._post, group)

    async def _post(self, group: wire.ScoredData) -> None:
        while True:
            registration = self.registration
            try:
                with stage("post", versions=group.policy_versions):
                    await self.api.post(msgspec.structs.replace(group, env_id=registration.env_id))
            except PeerRefused as refusal:
                if refusal.key == "env_id":  # the API was restarted: wait for the new registration
                    self._woken.set()
                    while self._registration is registration:
                        await asyncio.sleep(POLL_S)
                    continue
                self._lose("refused by the rollout API", refusal)
                return
            self._losses.used()
            self.reporter.tally.add(group)
            self._woken.set()  # one group fewer is in flight, so another may start
            return

    def _lose(self, reason: str, trouble: object, *, said: bool = False) -> None:
        if not said and not self.reporter.tally.dropped[reason]:  # one line for each reason and step is enough
            log.warning("%s", trouble)
        self._drop(reason)
        self._losses.lose(trouble)

    def _drop(self, reason: str) -> None:
        """Count a group that is not sent; another may start in its place."""
        self.reporter.tally.dropped[reason] += 1
        self._woken.set()

    def _start(self, tasks: Tasks, step: int, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run some work in a task. The task stays in `tasks` until it has ended, because tasks are counted."""

        async def run() -> None:
            try:
                await work(*arguments)
            except Exception as error:
                self._failure = self._failure or error
            finally:
                del tasks[task]
                if self._failure is not None or not self._items_left:
                    self._woken.set()

        task = asyncio.create_task(run())
        tasks[task] = step

    async def _leave(self) -> None:
        """Stop generation, post scored groups and disconnect, within about two seconds."""
        ended = [*self._generating, *filter(None, [self._evaluation, self._news])]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        if self._posting:
            await asyncio.wait(self._posting, timeout=GOODBYE_S)
        unsent = list(self._posting)
        for task in unsent:
            task.cancel()
        await asyncio.gather(*unsent, return_exceptions=True)
        if unsent:
            log.warning("%d scored groups could not be posted", len(unsent))
        if self._registration is not None:
            await self._take_leave()
        if self.reporter.tally.groups or self.reporter.tally.dropped:
            self.reporter.tally.measures = self.env.measures.take()
            log.info("since the last step: %s", self.reporter.tally.line())
        self.reporter.close()
        if self._file:
            self._file.close()

    async def _take_leave(self) -> None:
        """Save the state at the trainer's current step, which may be newer than the last status, and disconnect."""
        status = self._seen
        try:
            async with asyncio.timeout(GOODBYE_S / 2):
                status = await self.api.status(self.registration.env_id)
        except (PeerError, TimeoutError):
            log.info("disconnecting; the trainer's last known step is %s", status.current_step if status else "none")
        if status is not None:
            self._save_state(status.current_step)
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.api.disconnect(self.registration.env_id, patience=GOODBYE_S / 2)
        except (PeerError, TimeoutError) as error:
            log.info("could not disconnect from the rollout API: %s", error or "no answer")
