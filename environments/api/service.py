"""One run's rollout API: the queue, the groups' bytes and the store in step, and the endpoints that need no more."""

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

from msgspec import Struct
from msgspec.structs import asdict, replace

from environments.api import wire
from environments.api.errors import ApiError, StoreError
from environments.api.groups import Posted
from environments.api.http import Waiters, endpoint
from environments.api.overview import Explainer, History
from environments.api.queue import Lease, RolloutQueue, Tables
from environments.api.settings import Settings
from environments.api.store import Payloads, Store
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
RETRY_FULL_S = 5
"""Seconds after which a post that a full queue refused may be repeated: a trainer has usually taken a batch by then."""
KEPT_EVALUATIONS = 256


class Served(Struct, frozen=True):
    """A batch with its groups' bytes (MessagePack of `wire.PackedGroup`); the lease is None for a plain GET."""

    payloads: list[bytes]
    lease: Lease | None
    current_step: int


class Posts:
    """Which posts are repeated: by their key; or without one, because an earlier process may not have answered them.

    If the store is durable, bodies of posts without a key are remembered, for a process that continues after a crash:
    those of the earlier process's last seconds are *unanswered* for a while.
    """

    def __init__(self, tables: Tables, durable: bool, now: float) -> None:
        self.durable = durable
        self.keyed: dict[bytes, float] = tables("post", float)
        self.unkeyed: dict[bytes, float] = tables("unkeyed", float)
        self.unanswered: dict[bytes, float] = tables("unanswered", float)
        last = max([*self.keyed.values(), *self.unkeyed.values()], default=0.0)
        for digest, at in self.unkeyed.items():
            if at > last - UNANSWERED_S and digest not in self.unanswered:
                self.unanswered[digest] = now + RETRY_WINDOW_S
        self.unkeyed.clear()
        self.forget(now)

    def is_repeated(self, payload: bytes, key: bytes | None, now: float) -> bool:
        """Note a post, and return whether it was taken before."""
        if key is not None:
            if key in self.keyed:
                return True
            self.keyed[key] = now
        elif self.durable:
            digest = hashlib.blake2b(payload, digest_size=16).digest()
            self.unkeyed.pop(digest, None)  # the newest are last
            self.unkeyed[digest] = now
            return self.unanswered.pop(digest, now) > now
        return False

    def forget(self, now: float) -> None:
        """Forget the posts that nobody can repeat any more."""
        for posts, before in (
            (self.keyed, now - REMEMBERED_POSTS_S),
            (self.unkeyed, now - 2 * UNANSWERED_S),
            (self.unanswered, now),
        ):
            while posts and posts[oldest := next(iter(posts))] <= before:
                del posts[oldest]

    def clear(self) -> None:
        for posts in (self.keyed, self.unkeyed, self.unanswered):
            posts.clear()


class Service:
    """One run's rollout API. Call it from one event loop; what it answers is written down first."""

    def __init__(
        self, settings: Settings, clock: Callable[[], float] = time.time, timer: Callable[[], float] = time.monotonic
    ) -> None:
        """Open the store, if there is one, and continue from its content; raise StoreError if it can't be opened."""
        self.settings = settings
        self.clock = clock  # the time of day, for what is compared with what an earlier process wrote
        self.timer = timer  # seconds that no correction of the clock lengthens or shortens, for all that runs out
        self.store = store = Store(settings.store, settings.fsync)
        try:
            self.queue = queue = RolloutQueue(store.table, settings.env_timeout, timer())
            self._posts = Posts(store.table, settings.store is not None, clock())
        except StoreError as error:
            raise store.damaged(error.got) from None
        known = [*queue.groups, *queue.buffered]
        self.payloads = Payloads(store, known)
        self.explain = Explainer(queue)
        self.history = History(timer())
        self.latest: bytes | None = None
        self.evaluations: deque[wire.NumberedEvaluation] = deque(maxlen=KEPT_EVALUATIONS)
        self.failed = asyncio.Event()
        self.failure: StoreError | None = None
        self.batch_waiters, self.news_waiters = Waiters(), Waiters()
        self._warned: set[str] = set()
        self._limit = settings.max_queued_mb << 20
        if settings.store is not None:
            counts = len(known), len(queue.environments)
            log.info("store %s: %d groups, %d environments, step %d", settings.store, *counts, self.step)

    @property
    def step(self) -> int:
        return self.queue.run.current_step if self.queue.run else 0

    @property
    def trainer(self) -> wire.Register | None:
        return self.queue.run.trainer if self.queue.run else None

    # The trainer

    @endpoint("POST", "/register")
    async def register(self, body: wire.Register) -> wire.RegisterResponse:
        """Start or take over the run."""
        run = self.queue.register(body)
        log.info("trainer %d registered: batch_size %d, step %d", run.uuid, body.batch_size, run.current_step)
        await self.written()
        return wire.RegisterResponse(uuid=run.uuid, format=wire.FORMAT)

    async def next_batch(
        self, lease: float | None = None, request: str | None = None, uuid: int | None = None
    ) -> Served | None:
        """Return the next batch or None; without `lease` it counts as trained when this returns."""
        version = self.queue.version
        granted = self.queue.next_batch(self.timer(), lease or PLAIN_LEASE_S, request, uuid)
        if granted is None:
            if self.queue.version != version:  # the trainer's first request
                await self.written()
            return None
        try:
            payloads = await self.payloads.get(granted.groups)
        except StoreError as error:
            if granted.batch_id in self.queue.leases:  # else a reset took it while its groups were read
                self._fail(error)
            raise
        if lease is None:
            self.payloads.drop(self.queue.acknowledge(granted.batch_id))
        else:
            await self.payloads.leave(granted.groups)
        await self.written()
        return Served(payloads, None if lease is None else granted, self.step)

    @endpoint("POST", "/batch/{batch_id}/ack", fields=wire.Ack)
    async def acknowledge(self, batch_id: str, step: int | None = None) -> wire.LeaseResponse:
        """Note that a batch is trained."""
        self.payloads.drop(self.queue.acknowledge(batch_id, step))
        await self.written()
        return wire.LeaseResponse(status="acknowledged", current_step=self.step)

    @endpoint("POST", "/batch/{batch_id}/extend")
    async def extend(self, batch_id: str, lease: wire.Seconds, step: wire.Id | None = None) -> wire.LeaseResponse:
        """Hold a batch for longer, perhaps one that is trained."""
        self.queue.extend(batch_id, self.timer(), lease, step)
        await self.written()
        return wire.LeaseResponse(status="extended", current_step=self.step)

    @endpoint("POST", "/batch/{batch_id}/release")
    async def release(self, batch_id: str) -> wire.LeaseResponse:
        """Put a batch back at once."""
        self.queue.release(batch_id)
        await self.written()
        return wire.LeaseResponse(status="released", current_step=self.step)

    @endpoint("GET", "/evaluations")
    def evaluations_after(self, after: wire.Id = 0) -> wire.Evaluations:
        """Return those that the trainer has not seen."""
        return wire.Evaluations(evaluations=[each for each in self.evaluations if each.number > after])

    # The environments

    @endpoint("POST", "/register-env")
    async def register_environment(self, body: wire.RegisterEnv) -> wire.RegisterEnvResponse:
        """Return an id for the environment, or let it wait."""
        environment = self.queue.register_environment(body, self.timer())
        if environment is None or self.trainer is None:
            return wire.RegisterEnvResponse(status="wait for trainer to start", format=wire.FORMAT)
        log.info("environment %d registered: %s, groups of %d", environment.id, environment.name, body.group_size)
        await self.written()
        return wire.RegisterEnvResponse(
            status="success",
            env_id=environment.id,
            wandb_name=environment.name,
            checkpoint_dir=self.trainer.checkpoint_dir,
            starting_step=self.step,
            checkpoint_interval=self.trainer.save_checkpoint_interval,
            num_steps=self.trainer.num_steps,
            eval_every=self.trainer.eval_every,
            max_staleness=self.trainer.max_staleness,
            format=wire.FORMAT,
        )

    @endpoint("POST", "/disconnect-env")
    async def disconnect(self, body: wire.EnvIdentifier) -> wire.DisconnectResponse:
        """Note that an environment has left; one that never registered is a failure, and no HTTP error."""
        try:
            self.queue.disconnect(body.env_id)
        except ApiError as error:
            return wire.DisconnectResponse(status="failure", error=str(error))
        log.info("environment %d disconnected", body.env_id)
        await self.written()
        return wire.DisconnectResponse(status="success")

    @endpoint("GET", "/wandb_info")
    def wandb_info(self) -> wire.WandbInfo:
        """Return where the run is logged."""
        trainer = self.trainer
        return wire.WandbInfo(
            group=trainer.wandb_group if trainer else None, project=trainer.wandb_project if trainer else None
        )

    @endpoint("GET", "/info")
    def info(self) -> wire.Info:
        """Return the batch size and the limit of tokens."""
        trainer = self.trainer
        return wire.Info(
            batch_size=trainer.batch_size if trainer else -1, max_token_len=trainer.max_token_len if trainer else -1
        )

    def status_env(self, env_id: int, *, waits: bool = False) -> wire.StatusEnv:
        """Return what the environment paces itself by, as it `waits` for news or not; also its sign of life."""
        environment = self.queue.hear(env_id, self.timer())
        environment.follows |= waits
        return self.explain.status_env(env_id, self.seen if waits else None)

    @property
    def seen(self) -> str:
        """Another text whenever environments may have more room: by a step, a batch that left, a new neighbour."""
        return f"{self.queue.news & (1 << 64) - 1:x}"

    def take(self, posted: Posted, key: bytes | None = None) -> wire.ScoredDataResponse:
        """Take a group in; answer the client only after `written`. A second post with the same `key` is not kept."""
        group, payload = posted.group, posted.payload
        if group.env_id is not None:
            self.queue.environment(group.env_id, status=422)
        if self._posts.is_repeated(payload, key, self.clock()):
            return wire.ScoredDataResponse(status="received")
        score = fmean(wire.counted_scores(group) or [0.0])
        versions, now = group.policy_versions or (), self.timer()
        taken, buffered = self.queue.offer(group.env_id, len(group.lengths), len(payload), score, versions, now)
        self.payloads.put(taken.id, payload)
        self.latest = payload
        self.history.add(taken, group, now)
        return wire.ScoredDataResponse(status="received" if buffered is None else "buffered", buffer_size=buffered)

    def check_room(self) -> None:
        """Raise ApiError (429) if groups of `--max-queued-mb` or more wait; of twice that if they make no batch.

        Leased groups do not count: a trainer keeps them until its next checkpoint, and needs more batches to reach it.
        """
        if (waiting := self.queue.waiting_bytes) >= (most := self._most_waiting):
            makes_one = most == self._limit
            problem = Problem(
                "--max-queued-mb",
                got=f"{waiting >> 20} MiB of groups that wait",
                wanted=f"less than {most >> 20} MiB{'' if makes_one else ', or groups that make a batch'}",
                fix="post again when the trainer has taken a batch, and pace yourself by GET /status-env"
                if makes_one
                else "raise it: no batch can be made of these groups",
                summary="the queue is full",
            )
            raise ApiError(429, problem, retry_s=RETRY_FULL_S)

    @property
    def _most_waiting(self) -> int:
        """Bytes of groups at which posts are refused. If a trainer waits for more, it needs them for a batch."""
        queue = self.queue
        needs_more = queue.waiting_bytes >= self._limit and queue.run is not None and not queue.batch_ready
        return 2 * self._limit if needs_more else self._limit

    @endpoint("POST", "/evaluation")
    def take_evaluation(self, body: wire.Evaluation) -> wire.EvaluationResponse:
        """Keep figures for the trainer to fetch; a restart forgets them."""
        name = self.queue.environment(body.env_id).name
        last = self.evaluations[-1].number if self.evaluations else 0
        number = max(last + 1, int(1000 * self.clock()))  # above all those of an earlier process
        self.evaluations.append(wire.NumberedEvaluation(number=number, name=name, step=body.step, metrics=body.metrics))
        return wire.EvaluationResponse()

    # The whole

    @endpoint("GET", "/status")
    def status(self) -> wire.Status:
        """Return the queue explained."""
        status = self.explain.status(self.timer())
        limits = {"max_queued_bytes": self._limit, "durable": self.settings.store is not None}
        return replace(status, warnings=self._warnings(), **limits)

    def _warnings(self) -> list[str]:
        """Return what can never be served, and that the queue is full, until a quarter of it is free."""
        full = f"the queue is full (--max-queued-mb {self._limit >> 20}): posts are refused with 429 until the trainer "
        full += "takes a batch"
        limit = self._limit * 3 // 4 if full in self._warned else self._most_waiting
        return [*self.explain.warnings(), *([full] if self.queue.waiting_bytes >= limit else [])]

    @endpoint("GET", "/overview")
    def overview(self) -> dict[str, object]:
        """Return what the status page asks for every two seconds; `now` and `at` are seconds since the start."""
        history, status, now = self.history, self.status(), self.timer()
        report, pace = self.settings.report, history.seconds_per_step
        steps_left = max(0, status.num_steps - status.current_step)
        return {
            "run": str(self.settings.run_dir) if self.settings.run_dir else None,
            "has_report": report is not None and report.exists(),
            **asdict(self.wandb_info()),
            "now": now - history.start,
            "seconds_per_step": pace,
            "seconds_left": pace * steps_left if pace and status.num_steps > 0 else None,
            "status": status,
            "points": history.points(now),
            "samples": list(history.samples)[::-1],
            "refusals": list(history.refusals)[::-1],
            "refused": history.refused,
        }

    def refuse(self, request: str, status: int, detail: str, count: int = 1) -> None:
        self.history.refuse(request, status, detail, self.timer(), count)

    async def reset(self) -> None:
        """Forget the run, its environments and every group."""
        self.queue.reset()
        self.payloads.clear()
        self._posts.clear()
        self.history = History(self.timer())
        self.latest = None
        self.evaluations.clear()
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
            self._posts.forget(self.clock())
            await self.written()

    async def written(self) -> None:
        """Return when everything taken so far is as safe as this service makes it; then those who wait look again."""
        try:
            await self.store.commit()
        except StoreError as error:
            if self.settings.store is not None:
                self._fail(error)  # memory is now ahead of the disk: stop, and continue from what was written
                raise
            log.warning("%s", error)  # groups that were dropped keep their place in the file without a name
        if self.queue.run is not None:
            self.history.reached(self.step, self.timer())
        self.batch_waiters.tell(self.queue.version)
        self.news_waiters.tell(self.queue.news)

    def end_waits(self) -> None:
        """Have requests that wait answered now, and none wait from now on."""
        self.batch_waiters.end()
        self.news_waiters.end()

    def close(self) -> None:
        """Write what is left and let the store go."""
        self.store.close()

    def _fail(self, error: StoreError) -> None:
        self.failure = self.failure or error
        self.failed.set()
