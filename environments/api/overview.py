"""What the queue says of itself: GET /status-env, GET /status with the reason why no batch comes, the page's data."""

import math
from collections import deque
from typing import Any

import msgspec
from msgspec import Struct

from environments.api import wire
from environments.api.batch import can_make
from environments.api.queue import Group, RolloutQueue

MIN_ENV_WEIGHT = 0.01
"""Lowest weight in an answer to an environment, so that none starves."""
SILENT_S = 30.0
"""Seconds without a group after which an environment is named as one that the next batch waits for."""
SAMPLES = 8
REFUSALS = 20
STEPS = 240
PACE_STEPS = 50
"""Number of last steps whose mean time is the pace."""
_SHOWN_TEXT = 1200
_SHOWN_SEQUENCES = 8


class Explainer:
    """Answers about one queue. Sums over all environments are kept until the queue changes, because hundreds of
    environments ask ten times a second."""

    def __init__(self, queue: RolloutQueue) -> None:
        self.queue = queue
        self._at = -1

    @property
    def _batch_size(self) -> int:
        return self.queue.run.trainer.batch_size if self.queue.run else 0

    def _sizes(self) -> set[int]:
        """Sizes of the groups that are queued, and of those that environments will post."""
        return {each.request.group_size for each in self.queue.alive} | {*self.queue.groups_by_size}

    def status_env(self, env_id: int, seen: str | None = None) -> wire.StatusEnv:
        """Return how much is queued, counted as the asking environment does: in groups of that environment's size.

        Other environments' groups count beyond what is reserved for them, rounded up to the largest group. An
        environment that waits for news gets leases, trainer, and `seen`. If the environments' groups differ in size,
        their parts may make no batch; each environment then gets room for one more group.
        """
        queue, environment = self.queue, self.queue.environment(env_id)
        if self._at != queue.version:
            self._refresh()
            self._at = queue.version
        request = environment.request
        size = max(request.group_size, *queue.sizes.get(env_id, ()), 1)
        weight = request.max_token_length * request.weight / self._weights if self._weights else 0.0
        weight, own = max(MIN_ENV_WEIGHT, weight), queue.sequences_of(env_id)
        others = self._all_available - self._available.get(env_id, 0)
        whole, part = (own + others) // size, own // size
        if self._stuck:  # an environment stops at the groups of a batch, or at its part of them (`pace.py`)
            batch = self._batch_size / size
            whole, part = min(whole, math.ceil(batch) - 1), min(part, math.ceil(batch * min(1.0, weight)) - 1)
        return wire.StatusEnv(
            current_step=queue.run.current_step if queue.run else 0,
            queue_size=whole,
            unallocated_fraction=1.0 - min(self._reserved, 1.0),
            self_queue_size=part,
            max_group_size=self._largest,
            env_weight=weight,
            leased=None if seen is None else queue.untrained // size,
            trainer=None if seen is None or queue.run is None else queue.run.trainer,
            seen=seen,
        )

    def _refresh(self) -> None:
        queue = self.queue
        self._weights = sum(each.request.max_token_length * each.request.weight for each in queue.alive)
        shares = {each.id: each.request.min_batch_allocation or 0.0 for each in queue.alive}
        self._reserved = sum(shares.values())
        self._largest = max((size for sizes in queue.sizes.values() for size in sizes), default=1)
        self._available = {
            env_id: max(0, -(-queue.sequences_of(env_id) // self._largest) * self._largest - reserved)
            for env_id in queue.sizes
            for reserved in [int(self._batch_size * shares.get(-1 if env_id is None else env_id, 0.0))]
        }
        self._all_available = sum(self._available.values())
        # Environments stop at their parts of a batch (`pace.py`). If groups of several sizes are enough and make no
        # batch, each environment gets room for one more. Reserved places are filled whatever the queue holds.
        enough = self._all_available >= self._batch_size > 0 and len(queue.alive) > 1 and not self._reserved
        self._stuck = enough and not queue.batch_ready and can_make(self._batch_size, self._sizes())

    def status(self, now: float) -> wire.Status:
        """Return everything that explains why the next batch comes or does not."""
        queue, run, by_size = self.queue, self.queue.run, self.queue.groups_by_size
        return wire.Status(
            current_step=run.current_step if run else 0,
            queue_size=len(queue.line),
            registered=run is not None,
            started=run is not None and run.started,
            batch_size=run.trainer.batch_size if run else -1,
            num_steps=run.trainer.num_steps if run else -1,
            queued_sequences=queue.sequences,
            queued_bytes=queue.queued_bytes,
            buffered_groups=len(queue.buffered),
            leased_groups=len(queue.groups) - len(queue.line),
            batch_ready=queue.batch_ready,
            waiting_for=self.waiting_for(now),
            groups_by_size={str(size): by_size[size] for size in sorted(by_size)},
            environments=self._environments(now),
            leases=[
                wire.LeaseStatus(batch_id=each, groups=len(lease.groups), expires_in_s=queue.deadlines[each] - now)
                for each, lease in queue.leases.items()
            ],
            staleness=self.staleness(),
            unfit_sizes=self.unfit_sizes(),
        )

    def unfit_sizes(self) -> list[int]:
        """Return the sizes of all groups if no sum of them is a batch; none if there is one."""
        sizes = self._sizes()
        fits = self.queue.run is None or can_make(self._batch_size, sizes)
        return [] if fits else sorted(sizes)

    def waiting_for(self, now: float) -> str | None:
        """Return what is missing for the next batch, or None where one can be made."""
        queue, target = self.queue, self._batch_size
        if queue.run is None:
            return "a trainer: POST /register"
        if queue.batch_ready:
            return None
        reasons = []
        queued = queue.sequences
        if queued < target:
            reasons.append(f"{target - queued} more sequences ({queued} of {target} queued)")
        for env_id, minimum in queue.minima().items():
            if (have := queue.sequences_of(env_id)) < minimum:
                name = queue.environments[env_id].name
                reasons.append(f"{minimum - have} more from {name} (reserved {minimum}, queued {have})")
        if not reasons:
            sizes = ", ".join(map(str, sorted(queue.groups_by_size)))
            reasons.append(f"groups of {sizes} that make exactly {target} sequences")
        for each in queue.alive:
            if (unheard := now - each.heard) >= SILENT_S:
                reasons.append(f"{each.name} has not asked for anything for {unheard:.0f} s")
            elif (silent := now - max(each.posted, queue.last_granted)) >= SILENT_S:
                reasons.append(f"{each.name} has posted nothing for {silent:.0f} s")
        if not queue.alive:
            last = list(queue.environments.values())[-1:]
            reasons.append(f"no environment is there{f', the last one was {last[0].name}' if last else ''}")
        return "; ".join(reasons)

    def warnings(self) -> list[str]:
        """Return what can never be served as things are, naming the sizes and the way out."""
        queue, target, sizes = self.queue, self._batch_size, self._sizes()
        if queue.run is None:
            return []
        found = []
        if unfit := self.unfit_sizes():
            listed = ", ".join(map(str, unfit))
            fix = "use a batch_size that is"
            found.append(f"no batch can ever be made: batch_size {target} is no sum of groups of {listed}; {fix}")
        else:
            for size, count in sorted(queue.groups_by_size.items()):
                if size > target or not can_make(target - size, sizes):
                    found.append(
                        f"{count} groups of {size} can never fit a batch of {target} with the other groups' sizes"
                    )
        for env_id, minimum in queue.minima().items():
            name, request = queue.environments[env_id].name, queue.environments[env_id].request
            if minimum < (share := int(target * (request.min_batch_allocation or 0.0))):
                found.append(
                    f"{name} reserves {share} of {target} sequences and gets {minimum}:"
                    f" more does not fit with the others in whole groups of {request.group_size}"
                )
        for env_id, buffer in queue.buffers.items():
            name, request = queue.environments[env_id or 0].name, queue.environments[env_id or 0].request
            found.append(
                f"{name}: {len(buffer)} groups ({sum(group.size for group in buffer)} sequences) are buffered until"
                f" some sum to its group_size {request.group_size}"
            )
        return found

    def _environments(self, now: float) -> list[wire.EnvStatus]:
        queue, minima, buffers = self.queue, self.queue.minima(), self.queue.buffers
        return [
            wire.EnvStatus(
                env_id=each.id,
                name=each.name,
                group_size=each.request.group_size,
                connected=each.connected,
                alive=each.alive,
                idle_s=max(0.0, now - each.heard),
                posted_s=max(0.0, now - each.posted),
                weight=each.request.weight,
                reserved=minima.get(each.id, 0),
                queued_groups=sum(queue.sizes.get(each.id, {}).values()),
                queued_sequences=queue.sequences_of(each.id),
                buffered_sequences=sum(group.size for group in buffers.get(each.id, ())),
                received_groups=each.received,
                follows=each.follows,
            )
            for each in queue.environments.values()
        ]

    def staleness(self) -> wire.Staleness | None:
        """Return the policy versions of the queued groups; None where no group says its version."""
        oldest = [each.oldest_version for each in self.queue.line.values() if each.oldest_version is not None]
        newest = [each.newest_version for each in self.queue.line.values() if each.newest_version is not None]
        if not oldest:
            return None
        step = self.queue.run.current_step if self.queue.run else 0
        behind = max(0, step - min(oldest))
        return wire.Staleness(oldest_version=min(oldest), newest_version=max(newest), behind=behind)


class Point(Struct):
    """Groups that came while the trainer had reached `step`, from `at` on (seconds since the start).

    `mean`, `low` and `high` are of the groups' mean scores.
    """

    step: int
    at: float
    seconds: float = 0.0
    groups: int = 0
    tokens: int = 0
    mean: float = 0.0
    low: float = math.inf
    high: float = -math.inf


class History:
    """What the status page shows: the last `STEPS` steps, the newest `SAMPLES` groups, and the newest refusals.

    It counts from `start`, on the clock of all later times.
    """

    def __init__(self, start: float) -> None:
        self.start = start
        self.groups = self.refused = 0
        self.samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self.refusals: deque[dict[str, Any]] = deque(maxlen=REFUSALS)
        self._points: deque[Point] = deque([Point(0, 0.0)], maxlen=STEPS)
        self._paced_from: float | None = None  # when the trainer came; its first step has its start in it

    def add(self, group: Group, packed: wire.PackedGroup, now: float) -> None:
        """Note a group that has come: its numbers, and its texts (cut)."""
        self._points[-1].seconds = now - self.start - self._points[-1].at
        point, score = self._points[-1], group.mean_score
        point.low, point.high = min(point.low, score), max(point.high, score)
        point.groups += 1
        point.mean += (score - point.mean) / point.groups
        point.tokens += sum(packed.lengths)
        self.groups += 1
        self.samples.append(
            {
                "id": group.id,
                "env_id": group.env_id,
                "scores": packed.scores[:_SHOWN_SEQUENCES],
                "lengths": packed.lengths[:_SHOWN_SEQUENCES],
                "texts": [_text(conversation) for conversation in (packed.messages or [])[:_SHOWN_SEQUENCES]],
                "policy_version": group.oldest_version,
            }
        )

    def refuse(self, request: str, status: int, detail: str, now: float, count: int = 1) -> None:
        """Note a request that is refused, or several in one entry."""
        self.refused += count
        refusal = {"at": now - self.start, "request": request[:100], "status": status, "detail": detail[:400]}
        self.refusals.append(refusal)

    def reached(self, step: int, now: float) -> None:
        """Note the step of a trainer that has registered; it may be the one noted before."""
        last, at = self._points[-1], now - self.start
        last.seconds = at - last.at
        if self._paced_from is None or step < last.step:  # a trainer has come, or one was resumed
            self._paced_from = at
        if step < last.step:  # later steps come again
            self._points = deque((point for point in self._points if point.step < step), maxlen=STEPS)
        if step != last.step:
            self._points.append(Point(step, at))

    def points(self, now: float) -> list[Point]:
        """Return the steps in which groups came, oldest first."""
        self._points[-1].seconds = now - self.start - self._points[-1].at
        return [point for point in self._points if point.groups]

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the last `PACE_STEPS` steps; None before two are done, as the first one has the start in it."""
        steps = [point for point in self._points if point.at > (self._paced_from or 0.0)][-PACE_STEPS - 1 :]
        return (steps[-1].at - steps[0].at) / (steps[-1].step - steps[0].step) if len(steps) > 1 else None


def _text(conversation: list[dict[str, Any]] | msgspec.Raw) -> str:
    """Return the conversation's end: what the policy said is last."""
    if isinstance(conversation, msgspec.Raw):  # of a group in MessagePack, whose messages stay encoded
        conversation = msgspec.msgpack.decode(conversation, type=list[dict[str, Any]])
    lines = []
    for message in conversation[-6:]:
        role, content = message["role"], message["content"]
        shown = content[-_SHOWN_TEXT:] if isinstance(content, str) else f"({type(content).__name__})"
        lines.append(f"{role[:40] if isinstance(role, str) else '?'}: {shown}")
    return "\n".join(lines)[-_SHOWN_TEXT:]
