"""``serve``: supply the trainer with groups, with a limit on how far ahead of it they are.

    _listen    waits at the API for news, such as a step of the trainer
    _follow    asks the API for its status, after news and after each posted group
    _work      starts a group as soon as the latest status leaves room for one
    _group     takes an item, generates, scores and posts: a task for each group

Each of them reports what it has changed through one condition variable, `_changed`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from environments.api import wire
from environments.config import BaseEnvConfig, ConfigError
from environments.items import Shuffled
from environments.peers.http import PeerError, PeerRefused
from environments.peers.rollout_api import NotRegistered, RolloutApi
from environments.running.groups import EnvironmentFailed, GroupMaker, set_up
from environments.running.metrics import Reporter, open_lines
from environments.running.pace import InFlight, Limits, groups_to_start
from environments.running.state import FOLDER, StateFiles, keep
from environments.scoring import GRACE_S, OF_CODE, error_of_code
from grpo_common.trace import lane, stage

if TYPE_CHECKING:
    from environments.base import BaseEnv

log = logging.getLogger(__name__)

WAIT_S = 20.0
"""Seconds that the API may hold a status request until something changes."""
TOGETHER_S = 0.005
"""Seconds after which groups that are posted at about the same time are followed by one status request."""
REGISTER_AGAIN_S = 0.25
SAY_WAITING_EVERY_S = 60.0
HEARD_EVERY_S = 10.0
"""Seconds between status requests during the last evaluation: the trainer waits as long as the API hears of it."""
GOODBYE_S = 0.8
"""Shutdown limits in seconds: for posting groups that are already scored, and then for disconnecting."""


def passed(every: int, before: int, step: int) -> bool:
    """Return whether a multiple of `every` is among the steps after `before`, up to `step`; of 0 there is none."""
    return every > 0 and step // every > before // every


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, unless `stop` is set before it is done; return whether it was done.

    Raise EnvironmentFailed if the work raised CancelledError, although nobody cancelled it.
    """
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:  # also after an interrupt: the environment disconnects before its connections close
        stopped.cancel()
        if not task.done():
            log.info("stop requested")
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=3 * (GRACE_S + GOODBYE_S))
            if not done:
                log.warning("setup(), evaluate() or the like ignores its cancellation: this process ends without it")
    if not task.done():
        return False
    if not task.cancelled():
        task.result()
    elif not stop.is_set():
        raise EnvironmentFailed("setup(), evaluate() or the like raised CancelledError", field="the environment")
    return not task.cancelled()


class Runner:
    """Runs one environment for one trainer."""

    def __init__(self, env: BaseEnv[Any, Any], api: RolloutApi) -> None:
        self.env = env
        self.config: BaseEnvConfig = env.config
        self.api = api
        self.reporter = Reporter(env.name)
        self.groups = GroupMaker(env, self.reporter.dropped)
        path = self.config.data_path_to_save_groups
        self._file = open_lines("--env.data_path_to_save_groups", path) if path else None
        self._registration: wire.RegisterEnvResponse | None = None
        self._info: wire.Info | None = None
        self._changed = asyncio.Condition()
        self._status: wire.StatusEnv | None = None
        self._moved_at = time.monotonic()
        self._said_empty = False
        self._is_known = False  # the API knows this environment, and the status is of it
        self._is_stale = True  # there is news since the status
        self._tasks: dict[asyncio.Task[None], Literal["making", "posting", ""]] = {}  # and what those of groups do
        self._evaluation: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._items_left = True
        self._started = 0
        # The trainer's step when each group was started, by the group's number. A posted group counts as in flight
        # until a status request that began after it: before, the status may count it or not.
        self._in_flight: dict[int, int] = {}
        self._posted: dict[int, int] = {}

    async def run(self) -> None:
        """Set up, register, and work until the trainer has done its steps or there are no more items; disconnect at
        the end, also after an error.

        Raise ConfigError if the settings do not fit the trainer's, and PeerError if the API or the server is gone or
        refuses, or if the environment fails for every item.
        """
        try:
            await set_up(self.env)
            if self.config.data_record is not None and (data := self.env.data_sets()):
                keep(self.config.data_record, data)
            await self._register()
            if (files := self._state_files()) and (step := self.registration.starting_step):  # a resumed run
                files.newest(step, self.env.restore)
            self.reporter.name = self.registration.wandb_name or self.env.name
            if path := self.config.metrics_path:
                self.reporter.file = open_lines("--env.metrics_path", path)
            await self._work()
        finally:
            await self._leave()

    @property
    def registration(self) -> wire.RegisterEnvResponse:
        """The latest registration; the work begins after the first."""
        assert self._registration is not None, "not registered yet"
        return self._registration

    @property
    def env_id(self) -> int:
        """The number that the API has given to this environment."""
        assert self.registration.env_id is not None, "checked by _register"
        return self.registration.env_id

    async def _register(self) -> None:
        said_at = float("-inf")
        while (answer := await self.api.register(self.env.name)).status != "success":
            if time.monotonic() - said_at >= SAY_WAITING_EVERY_S:
                said_at = time.monotonic()
                log.info("%s: the rollout API answers, waiting for the trainer", self.env.name)
            await asyncio.sleep(REGISTER_AGAIN_S)
        info = await self.api.info()
        if answer.env_id is None or info.batch_size < 1:
            got, fix = f"{answer}, {info}", "check --env.rollout_server_url"
            raise PeerError(field="the rollout API", got=got, wanted="an env_id and a batch size", fix=fix)
        self._obey(answer, info)

    def _obey(self, answer: wire.RegisterEnvResponse, info: wire.Info) -> None:
        """Take the settings of the trainer; raise ConfigError if those of the environment do not fit them."""
        if self.config.group_size > info.batch_size:
            raise ConfigError(
                field="--env.group_size",
                got=self.config.group_size,
                wanted=f"at most the trainer's batch of {info.batch_size} sequences",
                fix="lower it, or raise the trainer's batch",
            )
        last_steps = [step for step in (self.config.total_steps, answer.num_steps) if step is not None and step >= 0]
        self._registration, self._info = answer, info
        self._limits = Limits(info.batch_size, min(last_steps, default=-1), answer.max_staleness)
        self.env.num_steps = max(0, answer.num_steps or 0)
        self.groups.max_token_len = info.max_token_len
        log.info(
            "registered as %s: batches of %d sequences in groups of %d, step %s of %s",
            *(answer.wandb_name, info.batch_size, self.config.group_size, answer.starting_step),
            self._limits.last_step if last_steps else "any number",
        )
        items, groups = getattr(self.env, "items", None), info.batch_size // self.config.group_size
        if isinstance(items, Shuffled) and len(items) < groups:
            log.warning("a step has up to %d groups, of %d items: it has some more than once", groups, len(items))

    def _state_files(self) -> StateFiles | None:
        """Return the state files, in the folder of the settings or else in the trainer's checkpoints, if visible."""
        folder, named = self.config.state_dir, self.registration.checkpoint_dir
        if folder is None and named and Path(named).is_dir():
            folder = Path(named) / FOLDER
        return StateFiles(folder, self.config.wandb_name or self.env.name) if folder else None

    def _save_passed(self, before: int, step: int) -> None:
        """Save the state under the step of the newest checkpoint since `before`, where a resumed run looks for it."""
        every = self.registration.checkpoint_interval or 0
        if passed(every, before, step):
            self._save_state(step - step % every)

    def _save_state(self, step: int) -> None:
        if (files := self._state_files()) is None:
            return
        try:
            state = self.env.state()
        except OF_CODE as error:
            raise error_of_code(error) from error
        if state:
            files.save(step, state)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run some work in a task, whose error ends the environment."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._failure = self._failure or error
            finally:
                del self._tasks[task]
                async with self._changed:
                    self._changed.notify_all()

        def end(task: asyncio.Task[None]) -> None:  # that of a task which was cancelled before it began
            work.close()
            self._tasks.pop(task, None)

        task = asyncio.create_task(run())
        task.add_done_callback(end)
        self._tasks[task] = ""
        return task

    async def _change(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        async with self._changed:
            await self._changed.wait_for(condition)

    # ------------------------------------------------------------ groups

    async def _work(self) -> None:
        """Start groups until the trainer has done its steps, or the items are used up."""
        following, _ = self._start(self._follow()), self._start(self._listen())
        while True:
            await self._change(lambda: self._failure or self._why_over() or self._room() > 0)
            if self._failure is not None:
                raise self._failure
            if why := self._why_over():
                break
            assert self._status is not None, "there is room by a status"
            step, item = self._status.current_step, await self.groups.next_item()
            if item is None:
                self._items_left = False
                continue
            self._started += 1
            self._in_flight[self._started] = step
            self._tasks[self._start(self._group(self._started, item))] = "making"
        log.info(why)
        if self._evaluation is not None:
            for task in self._doing("making"):
                task.cancel()
            await asyncio.wait([self._evaluation, following], return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure

    def _doing(self, *what: str) -> list[asyncio.Task[None]]:
        return [task for task, doing in self._tasks.items() if doing in what]

    def _why_over(self) -> str:
        """Return why there is nothing left to do; empty: there is."""
        if self._status is not None and 0 <= self._limits.last_step <= self._status.current_step:
            return f"the trainer has done its {self._limits.last_step} steps"
        return "" if self._items_left or self._in_flight else "no more items"

    def _room(self) -> int:
        """Return how many groups may be started now."""
        if self._status is None or not self._is_known or not self._items_left:
            return 0
        steps = [*self._in_flight.values(), *self._posted.values()]
        in_flight = InFlight(len(steps), min(steps, default=None), self.groups.share.value)
        return groups_to_start(self._status, self._limits, self.config, in_flight)

    async def _group(self, number: int, item: object) -> None:
        try:
            with lane(f"group {number}"):
                group = await self.groups.make(item)
                if group is None:
                    return
                if self._file:
                    self._file.write(msgspec.json.encode(group).decode() + "\n")
                task = asyncio.current_task()
                assert task is not None, "runs in a task"
                self._tasks[task] = "posting"
                if await self._post(group):
                    self.groups.used()
                    self.reporter.add(group)
                    self._posted[number] = self._in_flight[number]
        finally:
            del self._in_flight[number]

    async def _post(self, group: wire.ScoredData) -> bool:
        """Post a group; return whether the API has it."""
        while True:
            known = self.registration
            try:
                with stage("post", versions=group.policy_versions):
                    await self.api.post(msgspec.structs.replace(group, env_id=known.env_id))
                return True
            except PeerRefused as refusal:
                if refusal.key != "env_id":
                    self.groups.lose("refused by the rollout API", refusal)
                    return False
            # The API was restarted: wait for the new registration.
            await self._change(lambda known=known: self._registration is not known)

    # ------------------------------------------------------------ the trainer's progress

    async def _follow(self) -> None:
        """Ask the API for its status whenever a group was posted, or `_listen` has heard of news."""
        while True:
            await self._change(lambda: self._is_stale or self._posted)
            await asyncio.sleep(TOGETHER_S)
            self._is_stale, posted = False, [*self._posted]
            try:
                status = await self.api.status(self.env_id)
            except NotRegistered:
                log.warning("the rollout API was restarted: registering again")
                self._is_known = False
                await self._register()
                self._is_stale = True
                self._posted.clear()
            else:
                for number in posted:
                    del self._posted[number]
                self._is_known = True
                self._take(status)
            async with self._changed:
                self._changed.notify_all()

    async def _listen(self) -> None:
        """Wait at the API for news, such as a step of the trainer, so that `_follow` asks for the status."""
        while True:
            await self._change(lambda: self._status is not None and not self._is_stale)
            assert self._status is not None, "waited for"
            wait, seen = HEARD_EVERY_S if self._why_over() else WAIT_S, self._status.seen or ""
            with suppress(NotRegistered):  # the next status request registers again
                await self.api.status(self.env_id, wait=wait, seen=seen)
            async with self._changed:
                self._is_stale = True
                self._changed.notify_all()

    def _take(self, status: wire.StatusEnv) -> None:
        """Take a new status: follow a new trainer and its step, start an evaluation, and warn if nothing changes.

        While one runs, others that fall due are left out; only that of the last step waits for it.
        """
        now, before, self._status = time.monotonic(), self._status, status
        if (trainer := status.trainer) is not None:
            told = msgspec.structs.replace(
                self.registration,
                checkpoint_dir=trainer.checkpoint_dir,
                checkpoint_interval=trainer.save_checkpoint_interval,
                num_steps=trainer.num_steps,
                eval_every=trainer.eval_every,
                max_staleness=trainer.max_staleness,
            )
            info = wire.Info(batch_size=trainer.batch_size, max_token_len=trainer.max_token_len)
            if (told, info) != (self._registration, self._info):  # another trainer has taken over
                self._obey(msgspec.structs.replace(told, starting_step=status.current_step), info)
        running = self._evaluation if self._evaluation is not None and not self._evaluation.done() else None
        if before is None or (status.current_step, status.queue_size) != (before.current_step, before.queue_size):
            self._moved_at = now
        elif now - self._moved_at >= SAY_WAITING_EVERY_S:
            self._moved_at = now
            log.warning(
                "no progress for %.0f s, waiting for %s: the trainer is at step %d, %d groups queued, "
                "%d in flight%s; %s",
                SAY_WAITING_EVERY_S,
                "groups in flight" if self._in_flight else "the evaluation" if running else "the trainer",
                *(status.current_step, status.queue_size, len(self._in_flight)),
                f", the oldest since step {min(self._in_flight.values())}" if self._in_flight else "",
                self.reporter.line({}),
            )
        if before is None or status.current_step == before.current_step:
            return
        step = self.env.curr_step = status.current_step
        self.reporter.end_step(step, self.env.measures.take())
        self._save_passed(before.current_step, step)
        every = self.config.steps_per_eval or self.registration.eval_every or 0
        if passed(every, before.current_step, step) and (running is None or 0 <= self._limits.last_step <= step):
            self._evaluation = self._start(self._evaluate(step, running))

    async def _evaluate(self, step: int, before: asyncio.Task[None] | None) -> None:
        """Evaluate and report. A failed evaluation only leaves a gap in a plot, so it does not stop training."""
        if before is not None:
            await asyncio.wait([before])
        try:
            metrics = await self.env.evaluate()
            if not (metrics or self._said_empty):
                self._said_empty = True
                log.warning("%s has nothing to evaluate: %s", self.env.name, self.env.no_evaluation)
            log.info("evaluation at step %d: %s", step, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
            self.reporter.record(step, {f"eval/{key}": value for key, value in metrics.items()})
            await self.api.post_evaluation(self.env_id, step, metrics)
        except OF_CODE as raised:
            error_of_code(raised)
            log.exception("the evaluation at step %d failed; training and later evaluations continue", step)

    # ------------------------------------------------------------ the end

    async def _leave(self) -> None:
        """Stop generation, post scored groups and disconnect, within about two seconds if no code of the environment
        ignores its cancellation."""
        await _cancel(self._doing("", "making"))
        if posting := self._doing("posting"):
            await asyncio.wait(posting, timeout=GOODBYE_S)
        if unsent := self._doing("posting"):
            await _cancel(unsent)
            log.warning("%d scored groups could not be posted", len(unsent))
        if self._registration is not None:
            await self._disconnect()
        if self.reporter.groups or self.reporter.dropped:
            log.info("since the last step: %s", self.reporter.line(self.env.measures.take()))
        for file in (self.reporter.file, self._file):
            if file is not None:
                file.close()

    async def _disconnect(self) -> None:
        """Save the state at the trainer's current step, which may be newer than the last status, and disconnect."""
        env_id, status = self.env_id, self._status
        try:
            async with asyncio.timeout(GOODBYE_S / 2):
                status = await self.api.status(env_id)
        except (PeerError, TimeoutError):
            log.info("disconnecting; the trainer's last known step is %s", status.current_step if status else "none")
        if status is not None and self._status is not None:
            self._save_passed(self._status.current_step, status.current_step)
            self._save_state(status.current_step)
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.api.disconnect(env_id, patience=GOODBYE_S / 2)
        except (PeerError, TimeoutError) as error:
            log.info("could not disconnect from the rollout API: %s", error or "no answer")


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    _, left = await asyncio.wait(tasks, timeout=GRACE_S) if tasks else ((), ())
    if left:
        log.warning("code of the environment ignores its cancellation: %d tasks are left behind", len(left))
