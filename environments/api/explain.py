"""What the queue says of itself: GET /status-env, GET /status, and why a batch does not come."""

import math

from environments.api import wire
from environments.api.queue import RolloutQueue
from environments.api.selection import can_make

MIN_ENV_WEIGHT = 0.01
"""Lowest weight in an answer to an environment, so that none starves."""
SILENT_S = 30.0
"""Seconds without a group after which an environment is named as one that the next batch waits for."""


class Explainer:
    """Answers about one queue. Sums over all environments are kept until the queue changes, because a thousand
    environments ask ten times a second."""

    def __init__(self, queue: RolloutQueue) -> None:
        self.queue = queue
        self._at = -1
        self._weights = 0.0
        self._reserved = 0.0
        self._available: dict[int | None, int] = {}
        self._all_available = 0
        self._untrained = 0
        self._stuck = False

    def status_env(self, env_id: int, seen: str | None = None) -> wire.StatusEnv:
        """How much is queued, counted as the asking environment does: in groups of that environment's size.

        Other environments' groups count beyond what is reserved for them, rounded up to the largest group. Leases are
        counted for who waits for news, and has `seen` what there is. If the environments' groups differ in size, their
        parts may make no batch. Each environment is then told of room for one more group.

        Raises:
            UnknownEnvironment: never registered.
        """
        queue = self.queue
        self._refresh()
        group_size = self._group_size(env_id)
        whole, own = self._queued(env_id)
        if self._stuck:
            whole, own = (min(one, part - 1) for one, part in zip((whole, own), self._parts(env_id), strict=True))
        return wire.StatusEnv(
            current_step=queue.run.current_step if queue.run else 0,
            queue_size=whole,
            unallocated_fraction=1.0 - min(self._reserved, 1.0),
            self_queue_size=own,
            max_group_size=queue.line.largest,
            env_weight=self._weight(env_id),
            leased=None if seen is None else self._untrained // group_size,
            seen=seen,
        )

    def _group_size(self, env_id: int) -> int:
        return max(self.queue.environment(env_id).request.group_size, *self.queue.line.sizes(env_id), 1)

    def _weight(self, env_id: int) -> float:
        """An environment's share of the weights."""
        request = self.queue.environment(env_id).request
        weight = request.max_token_length * request.weight
        return max(MIN_ENV_WEIGHT, weight / self._weights if self._weights else 0.0)

    def _queued(self, env_id: int) -> tuple[int, int]:
        """Groups in the queue: all, and the environment's own."""
        own = self.queue.line.sequences_by_env[env_id]
        others = self._all_available - self._available.get(env_id, 0)
        group_size = self._group_size(env_id)
        return (own + others) // group_size, own // group_size

    def _parts(self, env_id: int) -> tuple[int, int]:
        """Groups of a batch: all, and an environment's part by its weight. Environments stop at either (`pace.py`)."""
        batch = (self.queue.run.trainer.batch_size if self.queue.run else 0) / self._group_size(env_id)
        return math.ceil(batch), math.ceil(batch * min(1.0, self._weight(env_id)))

    def _is_stuck(self) -> bool:
        """Whether several environments without reservations have all stopped, and could make a batch with more."""
        queue = self.queue
        if queue.run is None or len(queue.alive) < 2 or self._reserved:
            return False
        for each in queue.alive:
            if all(one < part for one, part in zip(self._queued(each), self._parts(each), strict=True)):
                return False
        return not queue.batch_ready and can_make(queue.run.trainer.batch_size, self._sizes())

    def _sizes(self) -> set[int]:
        """Sizes of the groups that are queued, and of those that environments will post."""
        queue = self.queue
        return {queue.environments[each].request.group_size for each in queue.alive} | set(queue.line.groups_by_size)

    def _refresh(self) -> None:
        queue = self.queue
        if self._at == queue.changes:
            return
        self._at = queue.changes
        alive = [queue.environments[each].request for each in queue.alive]
        self._weights = sum(each.max_token_length * each.weight for each in alive)
        self._reserved = sum(each.min_batch_allocation or 0.0 for each in alive)
        batch_size = queue.run.trainer.batch_size if queue.run else 0
        largest = queue.line.largest
        self._available = {}
        for env_id, sequences in queue.line.sequences_by_env.items():
            share = 0.0
            if env_id is not None and env_id in queue.alive:
                share = queue.environments[env_id].request.min_batch_allocation or 0.0
            packed = -(-sequences // largest) * largest
            self._available[env_id] = max(0, packed - int(batch_size * share))
        self._all_available = sum(self._available.values())
        self._untrained = queue.untrained
        self._stuck = self._is_stuck()

    def status(self, now: float, durable: bool = False) -> wire.Status:
        """Everything that tells why the next batch comes or does not."""
        queue, line, run = self.queue, self.queue.line, self.queue.run
        return wire.Status(
            current_step=run.current_step if run else 0,
            queue_size=len(line.groups),
            registered=run is not None,
            started=run is not None and run.started,
            batch_size=run.trainer.batch_size if run else -1,
            num_steps=run.trainer.num_steps if run else -1,
            queued_sequences=line.sequences,
            queued_bytes=line.nbytes,
            buffered_groups=sum(len(buffer) for buffer in queue.buffers.values()),
            leased_groups=len(queue.leased),
            batch_ready=queue.batch_ready,
            waiting_for=self.waiting_for(now),
            groups_by_size={str(size): line.groups_by_size[size] for size in sorted(line.groups_by_size)},
            environments=self._environments(now),
            leases=[
                wire.LeaseStatus(
                    batch_id=batch_id, groups=len(lease.groups), expires_in_s=queue.leases.deadlines[batch_id] - now
                )
                for batch_id, lease in queue.leases.held.items()
            ],
            staleness=self.staleness(),
            durable=durable,
        )

    def waiting_for(self, now: float) -> str | None:
        """What is missing for the next batch, or None where one can be made."""
        queue, line = self.queue, self.queue.line
        if queue.run is None:
            return "a trainer: POST /register"
        if queue.batch_ready:
            return None
        target = queue.run.trainer.batch_size
        reasons = []
        if line.sequences < target:
            reasons.append(f"{target - line.sequences} more sequences ({line.sequences} of {target} queued)")
        for env_id, minimum in queue.minima().items():
            if (have := line.sequences_by_env[env_id]) < minimum:
                name = queue.environments[env_id].name
                reasons.append(f"{minimum - have} more from {name} (reserved {minimum}, queued {have})")
        if not reasons:
            sizes = ", ".join(str(size) for size in sorted(line.groups_by_size))
            reasons.append(f"groups of {sizes} that make exactly {target} sequences")
        return "; ".join([*reasons, *self._silent(now)])

    def _silent(self, now: float) -> list[str]:
        """Environments that have posted nothing since the last batch, for `SILENT_S` or more; or that none is there."""
        queue, found = self.queue, []
        for env_id in sorted(queue.alive):
            name, heard = queue.environments[env_id].name, now - queue.last_heard[env_id]
            if heard >= SILENT_S:
                found.append(f"{name} has not asked for anything for {heard:.0f} s")
            elif (silent := now - max(queue.last_posted[env_id], queue.last_granted)) >= SILENT_S:
                found.append(f"{name} has posted nothing for {silent:.0f} s")
        if queue.alive:
            return found
        last = queue.environments[-1:]
        return [f"no environment is there{f', the last one was {last[0].name}' if last else ''}"]

    def warnings(self) -> list[str]:
        """What can never be served as things are, naming the sizes and the way out."""
        queue, line = self.queue, self.queue.line
        if queue.run is None:
            return []
        target = queue.run.trainer.batch_size
        found = []
        sizes = self._sizes()
        if sizes and not can_make(target, sizes):
            listed = ", ".join(str(size) for size in sorted(sizes))
            found.append(
                f"no batch can ever be made: batch_size {target} is no sum of groups of {listed};"
                f" use a batch_size that is"
            )
        else:
            for size in sorted(line.groups_by_size):
                if size > target or not can_make(target - size, sizes):
                    found.append(
                        f"{line.groups_by_size[size]} groups of {size} can never fit a batch of {target}"
                        f" with the other groups' sizes"
                    )
        minima = queue.minima()
        for env_id, minimum in minima.items():
            request = queue.environments[env_id].request
            share = int(target * (request.min_batch_allocation or 0.0))
            if minimum < share:
                found.append(
                    f"{queue.environments[env_id].name} reserves {share} of {target} sequences and gets {minimum}:"
                    f" more does not fit with the others in whole groups of {request.group_size}"
                )
        for env_id, buffer in queue.buffers.items():
            environment = queue.environments[env_id]
            found.append(
                f"{environment.name}: {len(buffer)} groups ({sum(each.size for each in buffer)} sequences) are"
                f" buffered until some sum to its group_size {environment.request.group_size}"
            )
        return found

    def _environments(self, now: float) -> list[wire.EnvStatus]:
        queue, line = self.queue, self.queue.line
        minima = queue.minima()
        return [
            wire.EnvStatus(
                env_id=each.id,
                name=each.name,
                group_size=each.request.group_size,
                connected=each.connected,
                alive=each.id in queue.alive,
                idle_s=max(0.0, now - queue.last_heard[each.id]),
                posted_s=max(0.0, now - queue.last_posted[each.id]),
                weight=each.request.weight,
                reserved=minima.get(each.id, 0),
                queued_groups=line.groups_by_env[each.id],
                queued_sequences=line.sequences_by_env[each.id],
                buffered_sequences=sum(group.size for group in queue.buffers.get(each.id, ())),
                received_groups=queue.received[each.id],
                follows=each.id in queue.followers,
            )
            for each in queue.environments
        ]

    def staleness(self) -> wire.Staleness | None:
        """Policy versions of the queued groups; None where no group says its version."""
        versions = self.queue.line.groups_by_versions
        if not versions:
            return None
        oldest = min(low for low, _ in versions)
        newest = max(high for _, high in versions)
        step = self.queue.run.current_step if self.queue.run else 0
        return wire.Staleness(oldest_version=oldest, newest_version=newest, behind=max(0, step - oldest))
