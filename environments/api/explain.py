"""What the queue says of itself: GET /status-env, GET /status, and why a batch does not come."""

import math

from environments.api import wire
from environments.api.line import can_make
from environments.api.queue import RolloutQueue
from environments.api.records import Environment

MIN_ENV_WEIGHT = 0.01
"""Lowest weight in an answer to an environment, so that none starves."""
SILENT_S = 30.0
"""Seconds without a group after which an environment is named as one that the next batch waits for."""


class Explainer:
    """Answers about one queue. Sums over all environments are kept until the queue changes, because hundreds of
    environments ask ten times a second."""

    def __init__(self, queue: RolloutQueue) -> None:
        self.queue = queue
        self._at = -1

    def status_env(self, env_id: int, seen: str | None = None) -> wire.StatusEnv:
        """How much is queued, counted as the asking environment does: in groups of that environment's size.

        Other environments' groups count beyond what is reserved for them, rounded up to the largest group. Leases are
        counted for who waits for news, and has `seen` what there is. If the environments' groups differ in size, their
        parts may make no batch. Each environment is then told of room for one more group.

        Raises:
            UnknownEnvironment: never registered.
        """
        queue, environment = self.queue, self.queue.environment(env_id)
        self._refresh()
        whole, own = self._queued(environment)
        if self._stuck:
            whole, own = (min(one, part - 1) for one, part in zip((whole, own), self._parts(environment), strict=True))
        return wire.StatusEnv(
            current_step=queue.run.current_step if queue.run else 0,
            queue_size=whole,
            unallocated_fraction=1.0 - min(self._reserved, 1.0),
            self_queue_size=own,
            max_group_size=self._largest,
            env_weight=self._weight(environment),
            leased=None if seen is None else self._untrained // self._group_size(environment),
            seen=seen,
        )

    def _refresh(self) -> None:
        queue, line = self.queue, self.queue.line
        if self._at == queue.version:
            return
        self._at = queue.version
        batch_size = queue.run.trainer.batch_size if queue.run else 0
        self._weights = sum(each.request.max_token_length * each.request.weight for each in queue.alive)
        shares = {each.id: each.request.min_batch_allocation or 0.0 for each in queue.alive}
        self._reserved = sum(shares.values())
        self._largest = max(line.groups_by_size, default=1)
        self._available = {
            env: max(0, -(-line.sequences_of(env) // self._largest) * self._largest - int(batch_size * share))
            for env in line.sizes
            for share in [shares.get(-1 if env is None else env, 0.0)]
        }
        self._all_available = sum(self._available.values())
        self._untrained = queue.untrained
        self._stuck = self._is_stuck()

    def _group_size(self, environment: Environment) -> int:
        return max(environment.request.group_size, *self.queue.line.sizes.get(environment.id, ()), 1)

    def _weight(self, environment: Environment) -> float:
        """An environment's share of the weights."""
        weight = environment.request.max_token_length * environment.request.weight
        return max(MIN_ENV_WEIGHT, weight / self._weights if self._weights else 0.0)

    def _queued(self, environment: Environment) -> tuple[int, int]:
        """Groups in the queue: all, and the environment's own."""
        own = self.queue.line.sequences_of(environment.id)
        others = self._all_available - self._available.get(environment.id, 0)
        group_size = self._group_size(environment)
        return (own + others) // group_size, own // group_size

    def _parts(self, environment: Environment) -> tuple[int, int]:
        """Groups of a batch: all, and an environment's part by its weight. Environments stop at either (`pace.py`)."""
        batch = (self.queue.run.trainer.batch_size if self.queue.run else 0) / self._group_size(environment)
        return math.ceil(batch), math.ceil(batch * min(1.0, self._weight(environment)))

    def _is_stuck(self) -> bool:
        """Whether several environments without reservations have all stopped, and could make a batch with more.

        As long as one of them goes on, the others must wait: a fast environment would post more than its weight.
        """
        queue = self.queue
        if queue.run is None or len(queue.alive) < 2 or self._reserved:
            return False
        for each in queue.alive:
            if all(one < part for one, part in zip(self._queued(each), self._parts(each), strict=True)):
                return False
        return not queue.batch_ready and can_make(queue.run.trainer.batch_size, self._sizes())

    def _sizes(self) -> set[int]:
        """Sizes of the groups that are queued, and of those that environments will post."""
        return {each.request.group_size for each in self.queue.alive} | set(self.queue.line.groups_by_size)

    def status(self, now: float, durable: bool = False) -> wire.Status:
        """Everything that tells why the next batch comes or does not."""
        queue, line, run = self.queue, self.queue.line, self.queue.run
        by_size = line.groups_by_size
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
            groups_by_size={str(size): by_size[size] for size in sorted(by_size)},
            environments=self._environments(now),
            leases=[
                wire.LeaseStatus(
                    batch_id=batch_id, groups=len(lease.groups), expires_in_s=queue.deadlines[batch_id] - now
                )
                for batch_id, lease in queue.leases.items()
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
            if (have := line.sequences_of(env_id)) < minimum:
                name = queue.environments[env_id].name
                reasons.append(f"{minimum - have} more from {name} (reserved {minimum}, queued {have})")
        if not reasons:
            sizes = ", ".join(str(size) for size in sorted(line.groups_by_size))
            reasons.append(f"groups of {sizes} that make exactly {target} sequences")
        for each in queue.alive:
            if (unheard := now - each.heard) >= SILENT_S:
                reasons.append(f"{each.name} has not asked for anything for {unheard:.0f} s")
            elif (silent := now - max(each.posted, queue.last_granted)) >= SILENT_S:
                reasons.append(f"{each.name} has posted nothing for {silent:.0f} s")
        if not queue.alive:
            last = queue.environments[-1:]
            reasons.append(f"no environment is there{f', the last one was {last[0].name}' if last else ''}")
        return "; ".join(reasons)

    def warnings(self) -> list[str]:
        """What can never be served as things are, naming the sizes and the way out."""
        queue = self.queue
        if queue.run is None:
            return []
        target, sizes, by_size = queue.run.trainer.batch_size, self._sizes(), queue.line.groups_by_size
        found = []
        if sizes and not can_make(target, sizes):
            listed = ", ".join(str(size) for size in sorted(sizes))
            found.append(
                f"no batch can ever be made: batch_size {target} is no sum of groups of {listed};"
                f" use a batch_size that is"
            )
        else:
            found += [
                f"{by_size[size]} groups of {size} can never fit a batch of {target} with the other groups' sizes"
                for size in sorted(by_size)
                if size > target or not can_make(target - size, sizes)
            ]
        for env_id, minimum in queue.minima().items():
            name, request = queue.environments[env_id].name, queue.environments[env_id].request
            if minimum < (share := int(target * (request.min_batch_allocation or 0.0))):
                found.append(
                    f"{name} reserves {share} of {target} sequences and gets {minimum}:"
                    f" more does not fit with the others in whole groups of {request.group_size}"
                )
        for env_id, buffer in queue.buffers.items():
            name, request = queue.environments[env_id].name, queue.environments[env_id].request
            found.append(
                f"{name}: {len(buffer)} groups ({sum(each.size for each in buffer)} sequences) are buffered until some"
                f" sum to its group_size {request.group_size}"
            )
        return found

    def _environments(self, now: float) -> list[wire.EnvStatus]:
        queue, line, minima = self.queue, self.queue.line, self.queue.minima()
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
                queued_groups=sum(line.sizes.get(each.id, {}).values()),
                queued_sequences=line.sequences_of(each.id),
                buffered_sequences=sum(group.size for group in queue.buffers.get(each.id, ())),
                received_groups=each.received,
                follows=each.follows,
            )
            for each in queue.environments
        ]

    def staleness(self) -> wire.Staleness | None:
        """Policy versions of the queued groups; None where no group says its version."""
        groups = [each for each in self.queue.line.groups.values() if each.oldest_version is not None]
        if not groups:
            return None
        oldest = min(each.oldest_version or 0 for each in groups)
        newest = max(each.newest_version or 0 for each in groups)
        step = self.queue.run.current_step if self.queue.run else 0
        return wire.Staleness(oldest_version=oldest, newest_version=newest, behind=max(0, step - oldest))
