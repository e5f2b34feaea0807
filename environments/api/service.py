"""The rollout API without HTTP: the queue, the groups' bytes and the store, kept in step."""

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from environments.api import wire
from environments.api.explain import Explainer
from environments.api.groups import Posted
from environments.api.history import History, Overview
from environments.api.payloads import Payloads
from environments.api.queue import RolloutQueue
from environments.api.records import Journal, Lease, QueueFull, StoreError
from environments.api.settings import Settings
from environments.api.store import Store
from environments.api.waiting import Waiters
from grpo_common.errors import Problem

log = logging.getLogger("rollout-api")

PLAIN_LEASE_S = 60.0
"""How long a batch may take to be read for a trainer that does not lease; it is acknowledged before it is sent."""
REMEMBERED_POSTS_S = 600.0
"""How long the key of a posted group is remembered."""
UNANSWERED_S = 5.0
"""Posts this close to the last one of an earlier process may never have been answered."""
RETRY_WINDOW_S = 120.0
"""Time after a start in which clients repeat posts that the earlier process never answered."""
KEPT_EVALUATIONS = 256


class Served(Struct, frozen=True):
    """A batch with its groups' bytes (MessagePack of `wire.PackedGroup`); the lease is None for a plain GET."""

    payloads: list[bytes]
    lease: Lease | None
    current_step: int


class Service:
    """One run's rollout API. Call it from one event loop; what it answers is written down first."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the store, if there is one, and continue from its content.

        Args:
            clock: the time of day, for what is shown and what is compared with what an earlier process wrote.
            timer: seconds that no correction of the clock lengthens or shortens, for all that runs out.

        Raises:
            StoreError: the store cannot be opened or is in use.
        """
        self.settings = settings
        self.clock = clock
        self.timer = timer
        self.store = Store(settings.store, settings.fsync) if settings.store else None
        self.payloads = Payloads(self.store, settings.memory_mb << 20)
        self.history = History(timer())
        self.latest: bytes | None = None
        self.evaluations: deque[wire.NumberedEvaluation] = deque(maxlen=KEPT_EVALUATIONS)
        self.failed = asyncio.Event()
        self.failure: StoreError | None = None
        self.batch_waiters, self.news_waiters = Waiters(), Waiters()
        self._warned: set[str] = set()
        self._limit = settings.max_queued_mb << 20
        self.journal = self.store or Journal()
        self.queue = queue = RolloutQueue(self.journal, settings.env_timeout, timer())
        groups = [*queue.line.groups, *queue.leased, *(each.id for buffer in queue.buffers.values() for each in buffer)]
        self.payloads.adopt(groups)
        self._adopt_posts()
        if self.store is not None:
            step = queue.run.current_step if queue.run else "none"
            counts = len(groups), len(queue.environments)
            log.info("store %s: %d groups, %d environments, step %s", settings.store, *counts, step)
        self.explain = Explainer(self.queue)

    # The trainer

    async def register(self, trainer: wire.Register) -> wire.RegisterResponse:
        """Start or take over the run."""
        run = self.queue.register(trainer)
        log.info("trainer %d registered: batch_size %d, step %d", run.uuid, trainer.batch_size, run.current_step)
        await self.written()
        return wire.RegisterResponse(uuid=run.uuid, format=wire.FORMAT)

    async def next_batch(
        self, lease: float | None = None, request: str | None = None, uuid: int | None = None
    ) -> Served | None:
        """The next batch or None; without `lease` it counts as trained when this returns.

        Raises:
            NotRegistered, LeaseError: see `RolloutQueue.next_batch`.
        """
        started = self.queue.run is not None and self.queue.run.started
        grant = self.queue.next_batch(self.timer(), lease or PLAIN_LEASE_S, request, uuid)
        if grant is None:
            if not started:
                await self.written()
            return None
        try:
            payloads = await self.payloads.get(grant.lease.groups)
        except StoreError as error:
            if grant.lease.batch_id in self.queue.leases:  # else a reset took it while its groups were read
                self._fail(error)
            raise
        if lease is None:
            self._acknowledge(grant.lease.batch_id, None)
        else:
            self.payloads.leave(grant.lease.groups)
        await self.written()
        return Served(payloads, None if lease is None else grant.lease, self.step)

    async def acknowledge(self, batch_id: str, step: int | None) -> wire.LeaseResponse:
        """The batch is trained (see `RolloutQueue.acknowledge` for what is raised)."""
        self._acknowledge(batch_id, step)
        await self.written()
        return wire.LeaseResponse(status="acknowledged", current_step=self.step)

    async def extend(self, batch_id: str, lease: float, step: int | None = None) -> wire.LeaseResponse:
        """Hold a batch for longer, perhaps one that is trained (see `RolloutQueue.extend`, also for what is raised)."""
        self.queue.extend(batch_id, self.timer(), lease, step)
        await self.written()
        return wire.LeaseResponse(status="extended", current_step=self.step)

    async def release(self, batch_id: str) -> wire.LeaseResponse:
        """Put a batch back at once (raises as `RolloutQueue.release`)."""
        self.queue.release(batch_id)
        await self.written()
        return wire.LeaseResponse(status="released", current_step=self.step)

    # The environments

    async def register_environment(self, request: wire.RegisterEnv) -> wire.RegisterEnvResponse:
        """An id for the environment, or the word to wait."""
        environment = self.queue.register_environment(request, self.timer())
        if environment is None or self.queue.run is None:
            return wire.RegisterEnvResponse(status="wait for trainer to start", format=wire.FORMAT)
        log.info("environment %d registered: %s, groups of %d", environment.id, environment.name, request.group_size)
        await self.written()
        trainer = self.queue.run.trainer
        return wire.RegisterEnvResponse(
            status="success",
            env_id=environment.id,
            wandb_name=environment.name,
            checkpoint_dir=trainer.checkpoint_dir,
            starting_step=self.step,
            checkpoint_interval=trainer.save_checkpoint_interval,
            num_steps=trainer.num_steps,
            eval_every=trainer.eval_every,
            max_staleness=trainer.max_staleness,
            format=wire.FORMAT,
        )

    async def disconnect(self, env_id: int) -> None:
        """The environment is gone (raises UnknownEnvironment)."""
        self.queue.disconnect(env_id)
        log.info("environment %d disconnected", env_id)
        await self.written()

    def status_env(self, env_id: int, *, waits: bool = False) -> wire.StatusEnv:
        """What the environment paces itself by; also its sign of life (raises UnknownEnvironment).

        Args:
            waits: the request said `wait`; its answer has `leased` and `seen` as well.
        """
        environment = self.queue.hear(env_id, self.timer())
        environment.follows |= waits
        return self.explain.status_env(env_id, self.seen if waits else None)

    @property
    def seen(self) -> str:
        """Another text whenever environments may have more room: by a step, a batch that left, a new neighbour."""
        return f"{self.queue.news & (1 << 64) - 1:x}"

    def end_waits(self) -> None:
        """Have requests that wait answered now, and none wait from now on."""
        self.batch_waiters.end()
        self.news_waiters.end()

    def take(self, posted: Posted, key: bytes | None = None) -> wire.ScoredDataResponse:
        """Take a group in; answer the client only after `written`.

        Args:
            key: names this post: a second one with the same key is answered alike and not kept.

        Raises:
            UnknownEnvironment: its env_id was never given out.
        """
        group, payload = posted.group, posted.payload
        if group.env_id is not None:
            self.queue.environment(group.env_id)
        if self._is_known(payload, key):
            return wire.ScoredDataResponse(status="received")
        taken, buffered = self.queue.offer(
            group.env_id,
            len(group.lengths),
            len(payload),
            fmean(wire.counted_scores(group) or [0.0]),
            group.policy_versions or (),
            self.timer(),
        )
        self.payloads.put(taken.id, payload)
        self.latest = payload
        self.history.add(taken, group, self.timer())
        if buffered is None:
            return wire.ScoredDataResponse(status="received")
        return wire.ScoredDataResponse(status="buffered", buffer_size=buffered)

    def _is_known(self, payload: bytes, key: bytes | None) -> bool:
        """Note a post; whether it is a repeated one, by its key, or without one because its answer may be lost."""
        now = self.clock()
        if key is not None:
            if key in self._posts:
                return True
            self._posts[key] = now
            self.journal.put("post", key, now)
        elif self.store is not None:
            digest = hashlib.blake2b(payload, digest_size=16).digest()
            self._unkeyed.pop(digest, None)
            self._unkeyed[digest] = now
            self.journal.put("unkeyed", digest, now)
            if (until := self._unanswered.pop(digest, None)) is not None:
                self.journal.delete("unanswered", digest)
                return until > now
        return False

    def take_evaluation(self, evaluation: wire.Evaluation) -> wire.EvaluationResponse:
        """Keep figures for the trainer to fetch; a restart forgets them (raises UnknownEnvironment)."""
        name = self.queue.environment(evaluation.env_id).name
        last = self.evaluations[-1].number if self.evaluations else 0
        number = max(last + 1, int(1000 * self.clock()))  # above all those of an earlier process
        self.evaluations.append(
            wire.NumberedEvaluation(number=number, name=name, step=evaluation.step, metrics=evaluation.metrics)
        )
        return wire.EvaluationResponse()

    def evaluations_after(self, number: int) -> wire.Evaluations:
        """Those that the trainer has not seen."""
        return wire.Evaluations(evaluations=[each for each in self.evaluations if each.number > number])

    # The whole

    @property
    def step(self) -> int:
        """The step that the trainer has acknowledged."""
        return self.queue.run.current_step if self.queue.run else 0

    def status(self) -> wire.Status:
        """The queue explained."""
        status = self.explain.status(self.timer(), durable=self.store is not None)
        return replace(status, max_queued_bytes=self._limit, warnings=self._warnings())

    def check_room(self) -> None:
        """Raise QueueFull if groups of `--max-queued-mb` or more wait, in memory and on disk together.

        Leased groups do not count: a trainer keeps them until its next checkpoint, and needs more batches to reach it.
        """
        if (waiting := self.queue.waiting_bytes) >= self._limit:
            problem = Problem(
                "--max-queued-mb",
                got=f"{waiting >> 20} MiB of groups that wait",
                wanted=f"less than {self._limit >> 20} MiB",
                fix="post again when the trainer has taken a batch, and pace yourself by GET /status-env",
                summary="the queue is full",
            )
            raise QueueFull(429, problem)

    def _warnings(self) -> list[str]:
        """What can never be served, and that the queue is full; said until a quarter of it is free."""
        full = f"the queue is full (--max-queued-mb {self._limit >> 20}): posts are refused with 429 until the trainer "
        full += "takes a batch"
        limit = self._limit * 3 // 4 if full in self._warned else self._limit
        return [*self.explain.warnings(), *([full] if self.queue.waiting_bytes >= limit else [])]

    def overview(self) -> Overview:
        """What the status page shows."""
        trainer = self.queue.run.trainer if self.queue.run else None
        history, status, pace = self.history, self.status(), self.history.seconds_per_step
        report, steps = self.settings.report, status.num_steps
        return Overview(
            run=str(self.settings.run_dir) if self.settings.run_dir else None,
            has_report=report is not None and report.exists(),
            project=trainer.wandb_project if trainer else None,
            group=trainer.wandb_group if trainer else None,
            now=self.timer() - history.start,
            seconds_per_step=pace,
            seconds_left=pace * max(0, steps - status.current_step) if pace and steps > 0 else None,
            status=status,
            points=history.points(self.timer()),
            samples=list(history.samples)[::-1],
            refusals=list(history.refusals)[::-1],
            refused=history.refused,
        )

    def refuse(self, request: str, status: int, detail: str, count: int = 1) -> None:
        """Note a request that is refused, or several that the page shows as one, for the status page."""
        self.history.refuse(request, status, detail, self.timer(), count)

    async def reset(self) -> None:
        """Forget the run, its environments and every group."""
        self.queue.reset()
        self.payloads.clear()
        self.history = History(self.timer())
        self.latest = None
        self.evaluations.clear()
        for posts in (self._posts, self._unkeyed, self._unanswered):
            posts.clear()
        await self.written()

    async def keep_time(self, every: float = 0.5) -> None:
        """Let leases and silent environments run out, and say in the log what can never be served."""
        while True:
            await asyncio.sleep(every)
            self.queue.tick(self.timer())
            for warning in (warnings := self._warnings()):
                if warning not in self._warned:
                    log.warning("%s", warning)
            self._warned = set(warnings)
            self._forget_posts()
            await self.written()

    def close(self) -> None:
        """Write what is left and let the files go."""
        self.payloads.close()
        if self.store is not None:
            self.store.close()

    def _acknowledge(self, batch_id: str, step: int | None) -> None:
        self.payloads.drop(self.queue.acknowledge(batch_id, step))

    def _adopt_posts(self) -> None:
        """Posts of the earlier process; the last ones may be repeated by clients that got no answer.

        The unkeyed ones among them are *unanswered* for a while, also for a process that starts after another crash.
        """
        stored = {kind: self._stored_posts(kind) for kind in ("post", "unkeyed", "unanswered")}
        self._posts, self._unkeyed, self._unanswered = stored["post"], {}, stored["unanswered"]
        last = max([*stored["post"].values(), *stored["unkeyed"].values()], default=0.0)
        until = self.clock() + RETRY_WINDOW_S
        for key, at in stored["unkeyed"].items():
            self.journal.delete("unkeyed", key)
            if at > last - UNANSWERED_S and key not in self._unanswered:
                self._unanswered[key] = until
                self.journal.put("unanswered", key, until)
        self._forget_posts()

    def _stored_posts(self, kind: str) -> dict[bytes, float]:
        """The times of posts of a kind, by key, earliest first."""
        stored = self.journal.all(kind, float).items()
        return {key: at for key, at in sorted(stored, key=lambda post: post[1]) if isinstance(key, bytes)}

    def _forget_posts(self) -> None:
        """Forget the posts that nobody can repeat any more."""
        date = self.clock()
        for kind, posts, before in (
            ("post", self._posts, date - REMEMBERED_POSTS_S),
            ("unkeyed", self._unkeyed, date - 2 * UNANSWERED_S),
            ("unanswered", self._unanswered, date),
        ):
            while posts and (first := next(iter(posts.items())))[1] <= before:
                del posts[first[0]]
                self.journal.delete(kind, first[0])

    async def written(self) -> None:
        """Return when everything taken so far is as safe as this service makes it; then those who wait look again."""
        try:
            if self.store is not None:
                await self.store.commit()
            else:
                await self.payloads.flush()
        except StoreError as error:
            self._fail(error)  # memory is now ahead of the disk: stop, and continue from what was written
            raise
        if self.queue.run is not None:
            self.history.reached(self.step, self.timer())
        self.batch_waiters.tell(self.queue.version)
        self.news_waiters.tell(self.queue.news)

    def _fail(self, error: StoreError) -> None:
        self.failure = self.failure or error
        self.failed.set()
