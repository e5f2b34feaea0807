"""The rollout queue as a pure state machine: groups in, leased batches out, each group trained once.

No clock, no I/O: calls that time matters to get `now` (seconds of a clock that nobody sets), and what must survive a
crash is kept in tables, dictionaries that a store may write through. A group is in one place at a time:

    offered -> buffered (of an odd size) -> queued -> leased -> gone (acknowledged)
                                              ^          |
                                              +----------+  released, expired, taken over: back where it was

A lease of a trainer that says who it is does not run out by itself: out of reach, it may be training on the batch, and
must not get the same groups a second time. Such a lease ends when a trainer registers.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from environments.api import wire
from environments.api.batch import Pool, Reservation, choose, feasible_minima
from environments.api.errors import ApiError, StoreError
from grpo_common.errors import Problem

REMEMBERED_LEASES = 4096
"""Ended leases that are remembered, so that a repeated acknowledgement is understood, and a late one refused."""

_ENDED: Final[Mapping[wire.LeaseEnd, str]] = {
    "taken over": "was taken over by another trainer: its groups are trained again",
    "expired": "ran out: its groups are trained again",
    "released": "was released: its groups are trained again",
    "acknowledged": "was acknowledged: it is trained",
}

Tables: TypeAlias = Callable[[str, Any], dict[Any, Any]]
"""Where records are kept: a kind and a type of records give a dictionary with those of an earlier process."""


class Group(Struct, frozen=True):
    """What the queue knows of a group; its bytes lie elsewhere (`environments.api.store.Payloads`).

    Ids count up in order of arrival, so the lowest id is the oldest group. `size` is in sequences.
    """

    id: int
    env_id: int | None
    size: int
    nbytes: int
    mean_score: float
    oldest_version: int | None = None
    newest_version: int | None = None


class Environment(Struct):
    """A registered environment, connected until it disconnects."""

    id: int
    name: str
    request: wire.RegisterEnv
    connected: bool = True
    alive: bool = False  # connected and heard of lately: its reservation holds, and it may buffer groups
    heard: float = 0.0
    posted: float = 0.0  # when it last posted a group
    received: int = 0  # groups since the API's start
    follows: bool = False  # it waits for news
    restored: bool = False  # an earlier API process knew it, and it was not heard of since


class Run(Struct, frozen=True):
    """The trainer's registration and how far it is.

    `started` from its first GET /batch on; `next_group` is the lowest group id that was never given when the last batch
    was acknowledged, because acknowledged groups are not kept.
    """

    trainer: wire.Register
    uuid: int
    current_step: int
    started: bool = False
    next_group: int = 0


class Lease(Struct, frozen=True):
    """A batch in a trainer's hands, for `seconds` from when it was granted or extended. That time is not kept: the
    clock of another process, or of this one before it was set, says nothing of now."""

    batch_id: str
    groups: tuple[int, ...]
    seconds: float = 600.0
    request: str | None = None  # the client's key for asking again after a lost answer
    holder: int | None = None  # the uuid of the trainer; None: it did not say who it is, and the lease may run out
    trained: bool = False  # as the trainer has said, which keeps the batch until a checkpoint holds it


class Closed(Struct, frozen=True):
    """How a lease ended."""

    how: wire.LeaseEnd


class RolloutQueue:
    """Groups waiting to be trained, the environments that send them and the trainer that takes them.

    Its methods raise ApiError: 404 for an id that was never given out, 409 for a lease that has ended.

    Args:
        tables: the records of an earlier process continue. Leases have all their time again, as nobody could extend
            them without a server; environments have `env_timeout` to be heard of.
        env_timeout: seconds after which an environment that was not heard of loses its reservation.

    Attributes:
        version: another number after every change.
        groups: those that are queued or leased; `line` are the queued ones, oldest first.
        sizes: how many groups of each size an environment has in the line.
        closed: how the last leases ended; `deadlines` has when those that are held run out. Both are by batch id.
        given_back: the groups of batches that were returned and not given out again.
    """

    def __init__(self, tables: Tables = lambda kind, record: {}, env_timeout: float = 60.0, now: float = 0.0) -> None:
        self.env_timeout = env_timeout
        self.version = 0
        self._runs = tables("run", Run)
        self.environments: dict[int, Environment] = tables("environment", Environment)
        self.groups: dict[int, Group] = tables("group", Group)
        self.buffered: dict[int, Group] = tables("buffered", Group)
        self.leases: dict[str, Lease] = tables("lease", Lease)
        self.closed: dict[str, Closed] = tables("closed", Closed)
        self._begin()
        for environment in self.environments.values():
            environment.alive, environment.restored = environment.connected, True
            environment.heard = environment.posted = now
            environment.received, environment.follows = 0, False
        held = {each for lease in self.leases.values() for each in lease.groups}
        if lost := held - self.groups.keys():
            raise StoreError(got=f"leases of groups {sorted(lost)} that are missing")
        self.deadlines = {batch_id: now + lease.seconds for batch_id, lease in self.leases.items()}
        self._enqueue(group for each, group in self.groups.items() if each not in held)
        unused = max([*self.groups, *self.buffered], default=-1) + 1
        self.next_group = max(unused, self.run.next_group if self.run else 0)

    def _begin(self) -> None:
        self.line: dict[int, Group] = {}
        self.sizes: dict[int | None, Counter[int]] = {}
        self.queued_bytes = 0
        self.deadlines: dict[str, float] = {}
        self.given_back: list[tuple[int, ...]] = []
        self.last_granted = 0.0
        self.version += 1  # never back to an earlier number: answers are kept by it
        self._chosen: tuple[int, list[int] | None] = (-1, None)
        self._news = (-1, 0)

    # The trainer

    @property
    def run(self) -> Run | None:
        """The run, once a trainer has registered."""
        return self._runs.get(0)

    def _change_run(self, run: Run | None, **changes: Any) -> None:
        assert run is not None, "a batch without a run"
        self._runs[0] = replace(run, **changes)
        self.version += 1

    def register(self, trainer: wire.Register) -> Run:
        """Start the run, or take it over: the former trainer's leases return, queued groups are kept."""
        for batch_id in list(self.leases):
            self._return(batch_id, "taken over")
        uuid = trainer.uuid if trainer.uuid is not None else secrets.randbits(53)
        run = Run(trainer, uuid, trainer.starting_step)
        if self.run is not None:
            run = replace(run, started=self.run.started, next_group=self.run.next_group)
        self._change_run(run)
        return run

    def next_batch(self, now: float, lease: float, request: str | None = None, uuid: int | None = None) -> Lease | None:
        """Lease the oldest groups that make a batch for `lease` seconds; None where none can be made.

        The same `request` while its lease lasts gets the same batch again. With `uuid` the batch is that trainer's
        until it gives it back, or a trainer registers; if another trainer has, this one is refused (409).
        """
        if self.run is None:
            return None
        if uuid is not None and uuid != self.run.uuid:
            wanted = f"{self.run.uuid}, the trainer that has taken over"
            problem = Problem("uuid", got=str(uuid), wanted=wanted, fix="POST /register to take over")
            raise ApiError(409, problem, "uuid", "taken over")
        if not self.run.started:
            self._change_run(self.run, started=True)
        for held in self.leases.values():
            if request is not None and held.request == request:
                return self._extend(held, lease, now)
        ids = self._choice()
        if ids is None:
            return None
        self.last_granted = now
        granted = Lease(secrets.token_hex(8), tuple(ids), lease, request, uuid)
        self._take(ids)
        self.leases[granted.batch_id] = granted
        self.deadlines[granted.batch_id] = now + lease
        return granted

    def acknowledge(self, batch_id: str, step: int | None = None) -> tuple[int, ...]:
        """Note that a batch is trained. Return its groups' ids, to be forgotten; none if that was noted before."""
        if self.closed.get(batch_id) == Closed("acknowledged"):
            return ()
        ids = self._lease(batch_id).groups
        for each in ids:
            del self.groups[each]
        self._close(batch_id, "acknowledged")
        run = self.run
        reached = step if step is not None or run is None else run.current_step + 1
        self._change_run(run, current_step=reached, next_group=self.next_group)
        return ids

    def extend(self, batch_id: str, now: float, lease: float, step: int | None = None) -> Lease:
        """Hold a batch until `now + lease`.

        A trainer acknowledges what a checkpoint holds, and says with `step` how far it is before there is one.
        """
        held = self._lease(batch_id)
        if step is not None:
            self._change_run(self.run, current_step=step)
        return self._extend(held, lease, now, trained=step is not None)

    def release(self, batch_id: str) -> None:
        """Put a batch back at once, as a trainer does that stops."""
        if self.closed.get(batch_id) != Closed("released"):
            self._return(batch_id, "released")

    # The environments

    def register_environment(self, request: wire.RegisterEnv, now: float) -> Environment | None:
        """Return the environment with its id and name; None before a trainer's first request, and after its last step.

        An environment that comes after one of the same desired name has left takes over its id and name.
        """
        if self.run is None or not self.run.started or 0 < self.run.trainer.num_steps <= self.run.current_step:
            return None
        known = [each for each in self.environments.values() if each.request.desired_name == request.desired_name]
        for environment in known:
            was_killed = request.process is not None and environment.request.process == request.process
            if was_killed or not environment.alive or environment.restored:
                break
        else:
            environment = None
        if environment is None:
            name = f"{request.desired_name or 'env'}_{len(known)}"
            environment = Environment(len(self.environments), name, request)
        else:
            self._lose(environment)  # its buffer is of the former group size
            environment.request, environment.connected = request, True
        environment.posted = now
        self.environments[environment.id] = environment
        return self.hear(environment.id, now)

    def disconnect(self, env_id: int) -> None:
        """Note that an environment has left: its reservation ends, what it sent stays."""
        environment = self.environment(env_id)
        environment.connected = False
        self.environments[env_id] = environment
        self._lose(environment)

    def hear(self, env_id: int, now: float) -> Environment:
        """Note a sign of life."""
        environment = self.environment(env_id)
        environment.heard, environment.restored = now, False
        if environment.connected and not environment.alive:
            environment.alive = True
            self.version += 1
        return environment

    def environment(self, env_id: int, status: int = 404) -> Environment:
        """Return the environment of this id. Raises ApiError, with `status`, if it never registered."""
        if env_id not in self.environments:
            fix = "take the id that POST /register-env answers with"
            problem = Problem("env_id", got=str(env_id), fix=fix, summary="never registered")
            raise ApiError(status, problem, "env_id")
        return self.environments[env_id]

    def offer(
        self,
        env_id: int | None,
        size: int,
        nbytes: int,
        mean_score: float,
        versions: Iterable[int] = (),
        now: float = 0.0,
    ) -> tuple[Group, int | None]:
        """Take a group in. Return it, and the number of sequences buffered if its size is not its environment's.

        A group smaller than its environment's group size waits until some together have that size. A larger one
        never could, and is queued as it is.
        """
        environment = None if env_id is None else self.hear(env_id, now)
        span = list(versions)
        oldest, newest = min(span, default=None), max(span, default=None)
        group = Group(self.next_group, env_id, size, nbytes, mean_score, oldest, newest)
        self.next_group += 1
        self.version += 1
        if environment is not None:
            environment.posted = now
            environment.received += 1
        if environment is None or size >= environment.request.group_size or not environment.alive:
            self.groups[group.id] = group
            self._enqueue([group])
            return group, None
        self.buffered[group.id] = group
        buffer = self.buffers[environment.id]
        counts: Counter[int] = Counter()
        candidates: list[tuple[int, int]] = []
        for each in buffer:
            counts[each.size] += 1
            if counts[each.size] * each.size <= environment.request.group_size:
                candidates.append((each.id, each.size))
        ids = choose(environment.request.group_size, [Pool(candidates)])
        self._unbuffer(each for each in buffer if each.id in (ids or ()))
        return group, sum(each.size for each in self.buffers.get(environment.id, ()))

    def tick(self, now: float) -> None:
        """Let leases run out that are nobody's by name, and silent environments go."""
        for batch_id, deadline in list(self.deadlines.items()):
            if deadline <= now and self.leases[batch_id].holder is None:
                self._return(batch_id, "expired")
        for environment in self.environments.values():
            if environment.alive and now - environment.heard > self.env_timeout:
                self._lose(environment)

    def reset(self) -> None:
        """Forget everything; ids are not given again."""
        for table in (self._runs, self.environments, self.groups, self.buffered, self.leases, self.closed):
            table.clear()
        self._begin()

    # What is inside

    @property
    def alive(self) -> list[Environment]:
        """The environments that were heard of lately."""
        return [each for each in self.environments.values() if each.alive]

    @property
    def news(self) -> int:
        """Another number whenever environments may have more room: by a trainer, a step, groups that left, a neighbour.

        A group that arrives is no news: its environment knows of it. One that is buffered leaves its place free.
        """
        if self._news[0] != self.version:
            run = self.run and (self.run.trainer, self.run.current_step, self.run.started)
            left = self.next_group - len(self.line)
            self._news = self.version, hash((run, left, self.untrained, *(each.id for each in self.alive)))
        return self._news[1]

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the groups that no trainer has: queued and buffered ones."""
        return self.queued_bytes + sum(group.nbytes for group in self.buffered.values())

    @property
    def untrained(self) -> int:
        """Sequences that a trainer holds and has not said to have trained on."""
        held = (each for lease in self.leases.values() if not lease.trained for each in lease.groups)
        return sum(self.groups[each].size for each in held)

    @property
    def batch_ready(self) -> bool:
        """Whether the next GET /batch is answered with a batch."""
        return self.run is not None and self._choice() is not None

    @property
    def sequences(self) -> int:
        """Queued sequences."""
        return sum(map(self.sequences_of, self.sizes))

    def sequences_of(self, env_id: int | None) -> int:
        """Return the queued sequences of an environment."""
        return sum(size * count for size, count in self.sizes.get(env_id, {}).items())

    @property
    def groups_by_size(self) -> Counter[int]:
        """How many groups of each size are queued."""
        return sum(self.sizes.values(), Counter())

    @property
    def buffers(self) -> dict[int | None, list[Group]]:
        """By environment the groups that wait for others to have its group size together."""
        found: dict[int | None, list[Group]] = {}
        for group in self.buffered.values():
            found.setdefault(group.env_id, []).append(group)
        return found

    def minima(self) -> dict[int, int]:
        """Return the sequences of each batch that are kept for each living environment with a reservation."""
        reserving = {each.id: each for each in self.alive if each.request.min_batch_allocation is not None}
        if self.run is None or not reserving:
            return {}
        batch_size = self.run.trainer.batch_size
        reservations = {
            env_id: Reservation(
                int(batch_size * (each.request.min_batch_allocation or 0)),
                frozenset({each.request.group_size, *self.sizes.get(env_id, ())}),
            )
            for env_id, each in reserving.items()
        }
        others = {size for env_id, sizes in self.sizes.items() if env_id not in reserving for size in sizes}
        others |= {each.request.group_size for each in self.alive if each.id not in reserving}
        return feasible_minima(batch_size, reservations, frozenset(others))

    def _choice(self) -> list[int] | None:
        """Return the groups of the next batch; a batch that was given back comes again as it was."""
        assert self.run is not None, "a batch without a run"
        if self._chosen[0] != self.version:
            target = self.run.trainer.batch_size
            again = [ids for ids in self.given_back if sum(self.line[each].size for each in ids) == target]
            ids = list(min(again)) if again else choose(target, self.pools(target, self.minima()))
            self._chosen = self.version, ids
        return self._chosen[1]

    def pools(self, target: int, minima: Mapping[int, int]) -> list[Pool]:
        """Return the candidates for a batch: of each pool and size the oldest `target // size`, more fit into none.

        The first pool is of all without a reservation. The rest of a long line is not walked.
        """
        kept = {env_id for env_id, minimum in minima.items() if minimum}
        wanted: Counter[tuple[int | None, int]] = Counter()
        for env_id, sizes in self.sizes.items():
            for size, count in sizes.items():
                lane = env_id if env_id in kept else None, size
                wanted[lane] = min(wanted[lane] + count, target // size)
        missing = wanted.total()
        groups: dict[int | None, list[tuple[int, int]]] = {None: [], **{env_id: [] for env_id in kept}}
        for group in self.line.values():
            if not missing:
                break
            pool = group.env_id if group.env_id in kept else None
            if wanted[pool, group.size]:
                wanted[pool, group.size] -= 1
                missing -= 1
                groups[pool].append((group.id, group.size))
        return [Pool(each, minima[pool] if pool is not None else 0) for pool, each in groups.items()]

    def _enqueue(self, groups: Iterable[Group]) -> None:
        """Put groups into the line, each at its place by age."""
        in_order = True
        for group in groups:
            in_order = in_order and group.id > next(reversed(self.line), -1)
            self.line[group.id] = group
            self.sizes.setdefault(group.env_id, Counter())[group.size] += 1
            self.queued_bytes += group.nbytes
        if not in_order:
            self.line = {each: self.line[each] for each in sorted(self.line)}
        self.version += 1

    def _take(self, ids: Iterable[int]) -> None:
        """Take groups out of the line."""
        for each in ids:
            group = self.line.pop(each)
            sizes = self.sizes[group.env_id]
            sizes[group.size] -= 1
            if not sizes[group.size]:
                del sizes[group.size]
            if not sizes:
                del self.sizes[group.env_id]
            self.queued_bytes -= group.nbytes
        self.given_back = [batch for batch in self.given_back if all(each in self.line for each in batch)]
        self.version += 1

    def _unbuffer(self, groups: Iterable[Group]) -> None:
        complete = list(groups)
        for group in complete:
            del self.buffered[group.id]
            self.groups[group.id] = group
        self._enqueue(complete)

    def _lose(self, environment: Environment) -> None:
        """Note that an environment is gone: no batch waits for it, and its buffer may be trained."""
        environment.alive = False
        self._unbuffer(self.buffers.get(environment.id, ()))

    def _extend(self, lease: Lease, seconds: float, now: float, trained: bool = False) -> Lease:
        self.deadlines[lease.batch_id] = now + seconds
        extended = replace(lease, seconds=seconds, trained=lease.trained or trained)
        if extended != lease:
            self.leases[lease.batch_id] = extended
            self.version += 1
        return extended

    def _return(self, batch_id: str, how: wire.LeaseEnd) -> None:
        """End a lease and put its groups back where their age places them: at the front."""
        groups = self._lease(batch_id).groups
        self._enqueue(self.groups[each] for each in groups)
        if how != "expired":
            self.given_back.append(groups)
        self._close(batch_id, how)

    def _close(self, batch_id: str, how: wire.LeaseEnd) -> None:
        del self.leases[batch_id], self.deadlines[batch_id]
        self.closed[batch_id] = Closed(how)
        if len(self.closed) > REMEMBERED_LEASES:
            del self.closed[next(iter(self.closed))]

    def _lease(self, batch_id: str) -> Lease:
        """Return a lease that is held."""
        if batch_id in self.leases:
            return self.leases[batch_id]
        if batch_id in self.closed:
            how = self.closed[batch_id].how
            raise ApiError(409, Problem(f"batch {batch_id}", summary=_ENDED[how]), "batch_id", how)
        wanted = "an id that GET /batch?lease=SECONDS gave"
        raise ApiError(404, Problem("batch_id", got=batch_id, wanted=wanted), "batch_id")
