"""The rollout queue as a pure state machine: groups in, leased batches out, each group trained once.

No clock, no I/O: calls that time matters to are given `now` (seconds of a clock that nobody sets), and what must
survive a crash is written to a `Journal`. A group is in one place at a time:

    offered -> buffered (of an odd size) -> queued -> leased -> gone (acknowledged)
                                              ^          |
                                              +----------+  released, expired, taken over: back where it was

A lease of a trainer that says who it is does not run out by itself: out of reach, it may be training on it all the
while, and must not be given the same groups a second time. It ends when a trainer registers.

Kinds of records in the journal: `run` (key 0), `environment`, `group` (queued or leased), `buffered`, `lease` and
`closed` (a lease that is over).
"""

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from environments.api import wire
from environments.api.line import Line, Pool, Reservation, choose, feasible_minima
from environments.api.records import (
    Closed,
    Environment,
    Group,
    Journal,
    Lease,
    LeaseError,
    NotRegistered,
    Run,
    UnknownEnvironment,
)
from grpo_common.errors import Problem

REMEMBERED_LEASES = 4096
"""Leases that are over and are remembered, so that a repeated or late acknowledgement is understood."""

_ENDED: Final[Mapping[wire.LeaseEnd, str]] = {
    "taken over": "was taken over by another trainer: its groups are trained again",
    "expired": "ran out, and its groups were given to another client: they are trained again",
    "released": "was released: its groups are trained again",
    "acknowledged": "was acknowledged: it is trained",
}


class Grant(Struct, frozen=True):
    """A batch for the trainer."""

    lease: Lease
    groups: list[Group]


class RolloutQueue:
    """Groups waiting to be trained, the environments that send them and the trainer that takes them.

    Args:
        journal: where changes are written down; what an earlier process wrote there is taken up. Leases have all their
            time again, as nobody could extend them without a server; environments have `env_timeout` to be heard of.
        env_timeout: seconds after which an environment that was not heard of loses its reservation.

    Attributes:
        version: another number after every change.
        closed: how the last leases ended, by batch id; `deadlines` has when those that are held run out.
    """

    def __init__(self, journal: Journal | None = None, env_timeout: float = 60.0, now: float = 0.0) -> None:
        self.journal = journal or Journal()
        self.env_timeout = env_timeout
        self.next_group = 0
        self.version = 0
        self._clear()
        self._restore(now)

    def _clear(self) -> None:
        self.run: Run | None = None
        self.environments: list[Environment] = []
        self.names: Counter[str | None] = Counter()
        self.last_granted = 0.0
        self.line = Line()
        self.buffers: dict[int, list[Group]] = {}
        self.leased: dict[int, Group] = {}
        self.leases: dict[str, Lease] = {}
        self.deadlines: dict[str, float] = {}
        self.closed: dict[str, Closed] = {}
        self.given_back: list[tuple[int, ...]] = []
        self.version += 1  # never back to an earlier number: answers are kept by it
        self._chosen: tuple[int, list[int] | None] = (-1, None)
        self._news = (-1, 0)

    def _restore(self, now: float) -> None:
        stored = self.journal.all
        self.run = stored("run", Run).get(0)
        for environment in sorted(stored("environment", Environment).values(), key=lambda each: each.id):
            environment.alive, environment.restored = environment.connected, True
            environment.heard = environment.posted = now
            environment.received, environment.follows = 0, False
            self.environments.append(environment)
            self.names[environment.request.desired_name] += 1
        self.leases = {lease.batch_id: lease for lease in stored("lease", Lease).values()}
        self.deadlines = {batch_id: now + lease.seconds for batch_id, lease in self.leases.items()}
        self.closed = {str(batch_id): closed for batch_id, closed in stored("closed", Closed).items()}
        groups = {group.id: group for group in stored("group", Group).values()}
        held = [each for lease in self.leases.values() for each in lease.groups]
        if lost := [each for each in held if each not in groups]:
            raise self.journal.damaged(f"leases of groups {lost} that are missing")
        self.leased = {each: groups.pop(each) for each in held}
        for group in sorted(groups.values(), key=lambda each: each.id):
            self.line.add(group, self._lane_owner(group.env_id))
        for group in sorted(stored("buffered", Group).values(), key=lambda each: each.id):
            self.buffers.setdefault(group.env_id or 0, []).append(group)
        ids = [*groups, *self.leased, *(group.id for buffer in self.buffers.values() for group in buffer)]
        self.next_group = max(self.run.next_group if self.run else 0, max(ids, default=-1) + 1)

    # The trainer

    def register(self, trainer: wire.Register) -> Run:
        """Start the run, or take it over: the former trainer's leases return, queued groups are kept."""
        uuid = trainer.uuid if trainer.uuid is not None else secrets.randbits(53)
        for batch_id in list(self.leases):
            self._return(batch_id, Closed("taken over"))
        run = Run(trainer, uuid, trainer.starting_step)
        if self.run is not None:
            run = replace(run, started=self.run.started, next_group=self.run.next_group)
        self._put_run(run)
        return run

    def next_batch(self, now: float, lease: float, request: str | None = None, uuid: int | None = None) -> Grant | None:
        """The oldest groups that make a batch, held for `lease` seconds; None where none can be made.

        The same `request` while its lease lasts gets the same batch again. With `uuid` the batch is that trainer's
        until it gives it back, or a trainer registers.

        Raises:
            NotRegistered: no trainer has registered.
            LeaseError: `uuid` is given and another trainer has taken over (409).
        """
        if self.run is None:
            raise NotRegistered("Trainer not registered. Call /register first.")
        if uuid is not None and uuid != self.run.uuid:
            wanted = f"{self.run.uuid}, the trainer that has taken over"
            problem = Problem("uuid", got=str(uuid), wanted=wanted, fix="POST /register to take over")
            raise LeaseError(409, problem, "uuid", "taken over")
        if not self.run.started:
            self._put_run(replace(self.run, started=True))
        for held in self.leases.values():
            if request is not None and held.request == request:
                granted = self._extend(held, lease, now)
                return Grant(granted, [self.leased[each] for each in granted.groups])
        ids = self._choice()
        if ids is None:
            return None
        self.last_granted = now
        granted = Lease(secrets.token_hex(8), tuple(ids), lease, request, uuid)
        self._hold(granted, now)
        return Grant(granted, [self.leased[each] for each in ids])

    def acknowledge(self, batch_id: str, step: int | None = None) -> tuple[int, ...]:
        """The batch is trained: its groups' ids, to be forgotten; none where it was acknowledged before.

        A lease that has expired may still be acknowledged while none of its groups was given out again.

        Raises:
            LeaseError: unknown (404), or given to another meanwhile (409).
        """
        if batch_id in self.leases:
            ids = self.leases[batch_id].groups
            for each in ids:
                del self.leased[each]
        elif self._end_of(batch_id).how == "acknowledged":
            return ()
        else:
            ids = self._expired(batch_id)
            self._take(ids)
        for each in ids:
            self.journal.delete("group", each)
        self._close(batch_id, Closed("acknowledged"))
        assert self.run is not None, "a lease without a run"
        step = self.run.current_step + 1 if step is None else step
        self._put_run(replace(self.run, current_step=step, next_group=self.next_group))
        return ids

    def extend(self, batch_id: str, now: float, lease: float, step: int | None = None) -> Lease:
        """Hold a batch until `now + lease`; `step` is the step that training on it has led to.

        A trainer acknowledges what a checkpoint holds, and says with `step` how far it is before there is one. A lease
        that has expired begins again while none of its groups was given out again.

        Raises:
            LeaseError: the lease is unknown (404) or has ended (409).
        """
        if batch_id not in self.leases:
            self._hold(Lease(batch_id, self._expired(batch_id), lease), now)
        if step is not None:
            assert self.run is not None, "a lease without a run"
            self._put_run(replace(self.run, current_step=step))
        return self._extend(self.leases[batch_id], lease, now, trained=step is not None)

    def release(self, batch_id: str) -> None:
        """Put a batch back at once, as a trainer does that stops.

        Raises:
            LeaseError: the lease is unknown (404) or has ended (409), unless by an earlier release.
        """
        if batch_id in self.leases:
            self._return(batch_id, Closed("released"))
        elif (closed := self._end_of(batch_id)).how != "released":
            raise _refusal(batch_id, closed)

    # The environments

    def register_environment(self, request: wire.RegisterEnv, now: float) -> Environment | None:
        """Return the environment's id and name; None while no trainer wants any: it has not asked for its first batch,
        or is done.

        An environment that comes after one of the same desired name has left takes over its id and name: in a resumed
        run it is the same environment. After a finished run, environments have to wait until another trainer registers,
        because they would find nothing to do before.
        """
        if self.run is None or not self.run.started or self.run.over:
            return None
        environment = next((each for each in self.environments if _goes_on_as(each, request)), None)
        if environment is None:
            number = self.names[request.desired_name]
            self.names[request.desired_name] += 1
            environment = Environment(len(self.environments), f"{request.desired_name or 'env'}_{number}", request)
            self.environments.append(environment)
        else:
            self._lose(environment)  # its buffer is of the former group size
            environment.request, environment.connected = request, True
        self.journal.put("environment", environment.id, environment)
        environment.posted = now
        return self.hear(environment.id, now)

    def disconnect(self, env_id: int) -> None:
        """An environment says goodbye: its reservation ends, what it sent stays.

        Raises:
            UnknownEnvironment: never registered.
        """
        environment = self.environment(env_id)
        environment.connected = False
        self.journal.put("environment", env_id, environment)
        self._lose(environment)

    def hear(self, env_id: int, now: float) -> Environment:
        """Note a sign of life.

        Raises:
            UnknownEnvironment: never registered.
        """
        environment = self.environment(env_id)
        environment.heard, environment.restored = now, False
        if environment.connected and not environment.alive:
            environment.alive = True
            self.version += 1
        return environment

    def environment(self, env_id: int) -> Environment:
        """The environment of this id.

        Raises:
            UnknownEnvironment: never registered.
        """
        if not 0 <= env_id < len(self.environments):
            fix = "take the id that POST /register-env answers with"
            problem = Problem("env_id", got=str(env_id), fix=fix, summary="never registered")
            raise UnknownEnvironment(404, problem, "env_id")
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
        """Take a group in; with the number of sequences buffered where its size is not its environment's.

        A group smaller than its environment's group size waits until some together have that size. A larger one
        never could, and is queued as it is.

        Raises:
            UnknownEnvironment: `env_id` was never registered.
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
            self._enqueue(group)
            self.journal.put("group", group.id, group)
            return group, None
        buffer = self.buffers.setdefault(environment.id, [])
        buffer.append(group)
        self.journal.put("buffered", group.id, group)
        ids = choose(environment.request.group_size, [Pool([(each.id, each.size) for each in buffer])])
        if ids is not None:
            self._unbuffer(environment.id, set(ids))
        return group, sum(each.size for each in self.buffers.get(environment.id, ()))

    # Time and the end

    def tick(self, now: float) -> None:
        """Let leases run out that are nobody's by name, and silent environments go."""
        for batch_id, deadline in list(self.deadlines.items()):
            if deadline <= now and (lease := self.leases[batch_id]).holder is None:
                self._return(batch_id, Closed("expired", lease.groups))
        for environment in self.environments:
            if environment.alive and now - environment.heard > self.env_timeout:
                self._lose(environment)

    def reset(self) -> None:
        """Forget everything."""
        self.journal.reset()
        self._clear()

    # What is inside

    @property
    def alive(self) -> list[Environment]:
        """The environments that were heard of lately."""
        return [each for each in self.environments if each.alive]

    @property
    def news(self) -> int:
        """Another number whenever environments may have more room: by a step, groups that left the queue, a neighbour.

        A group that arrives is no news: its environment knows of it. One that is buffered leaves its place free.
        """
        if self._news[0] != self.version:
            run = self.run and (self.run.uuid, self.run.current_step, self.run.started)
            left = self.next_group - len(self.line.groups)
            self._news = self.version, hash((run, left, self.untrained, *(each.id for each in self.alive)))
        return self._news[1]

    def minima(self) -> dict[int, int]:
        """Sequences of each batch that are kept for each living environment with a reservation."""
        if self.run is None:
            return {}
        batch_size, line = self.run.trainer.batch_size, self.line.sizes
        reservations = {
            each.id: Reservation(
                int(batch_size * (each.request.min_batch_allocation or 0)),
                frozenset({each.request.group_size, *line.get(each.id, ())}),
            )
            for each in self.environments
            if each.alive and each.reserves
        }
        if not reservations:
            return {}
        others = {size for env_id, sizes in line.items() if env_id not in reservations for size in sizes}
        others |= {each.request.group_size for each in self.alive if each.id not in reservations}
        return feasible_minima(batch_size, reservations, frozenset(others))

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the groups that no trainer has: queued and buffered ones."""
        return self.line.nbytes + sum(group.nbytes for buffer in self.buffers.values() for group in buffer)

    @property
    def untrained(self) -> int:
        """Sequences that a trainer holds and has not said to have trained on."""
        held = (each for lease in self.leases.values() if not lease.trained for each in lease.groups)
        return sum(self.leased[each].size for each in held)

    @property
    def batch_ready(self) -> bool:
        """Whether the next GET /batch is answered with a batch."""
        return self.run is not None and self._choice() is not None

    def _choice(self) -> list[int] | None:
        """The groups of the next batch; thought over again only after a change."""
        assert self.run is not None, "a batch without a run"
        if self._chosen[0] != self.version:
            target = self.run.trainer.batch_size
            ids = self._given_back(target) or choose(target, self.line.pools(target, self.minima()))
            self._chosen = (self.version, ids)
        return self._chosen[1]

    def _given_back(self, target: int) -> list[int] | None:
        """The oldest batch that a trainer gave back: it comes again as it was, whatever else has arrived since."""
        fitting = [ids for ids in self.given_back if sum(self.line.groups[each].size for each in ids) == target]
        return list(min(fitting)) if fitting else None

    def _lane_owner(self, env_id: int | None) -> int | None:
        return env_id if env_id is not None and self.environments[env_id].reserves else None

    def _enqueue(self, group: Group) -> None:
        self.line.add(group, self._lane_owner(group.env_id))
        self.version += 1

    def _take(self, ids: Iterable[int]) -> list[Group]:
        """Groups out of the line."""
        taken = [self.line.remove(each, self._lane_owner(self.line.groups[each].env_id)) for each in ids]
        out = {group.id for group in taken}
        self.given_back = [each for each in self.given_back if out.isdisjoint(each)]
        self.version += 1
        return taken

    def _unbuffer(self, env_id: int, ids: set[int]) -> None:
        rest = []
        for group in self.buffers.pop(env_id):
            if group.id not in ids:
                rest.append(group)
                continue
            self._enqueue(group)
            self.journal.delete("buffered", group.id)
            self.journal.put("group", group.id, group)
        if rest:
            self.buffers[env_id] = rest

    def _lose(self, environment: Environment) -> None:
        """An environment is gone: no batch waits for it, and what it left in its buffer may be trained."""
        environment.alive = False
        self.version += 1
        if environment.id in self.buffers:
            self._unbuffer(environment.id, {group.id for group in self.buffers[environment.id]})

    def _hold(self, lease: Lease, now: float) -> None:
        """Give queued groups into a trainer's hands."""
        self.leased.update((group.id, group) for group in self._take(lease.groups))
        if self.closed.pop(lease.batch_id, None) is not None:
            self.journal.delete("closed", lease.batch_id)
        self.leases[lease.batch_id] = lease
        self.deadlines[lease.batch_id] = now + lease.seconds
        self.journal.put("lease", lease.batch_id, lease)

    def _extend(self, lease: Lease, seconds: float, now: float, trained: bool = False) -> Lease:
        self.deadlines[lease.batch_id] = now + seconds
        extended = replace(lease, seconds=seconds, trained=lease.trained or trained)
        if extended != lease:
            self.leases[lease.batch_id] = extended
            self.version += 1
            self.journal.put("lease", lease.batch_id, extended)
        return extended

    def _return(self, batch_id: str, closed: Closed) -> None:
        """End a lease and put its groups back where their age places them: at the front."""
        groups = self.leases[batch_id].groups
        for each in groups:
            self._enqueue(self.leased.pop(each))
        if closed.how != "expired":
            self.given_back.append(groups)
        self._close(batch_id, closed)

    def _close(self, batch_id: str, closed: Closed) -> None:
        if self.leases.pop(batch_id, None) is not None:
            self.journal.delete("lease", batch_id)
        self.deadlines.pop(batch_id, None)
        self.closed.pop(batch_id, None)
        self.closed[batch_id] = closed
        self.journal.put("closed", batch_id, closed)
        if len(self.closed) > REMEMBERED_LEASES:
            oldest = next(iter(self.closed))
            del self.closed[oldest]
            self.journal.delete("closed", oldest)

    def _end_of(self, batch_id: str) -> Closed:
        """How a lease ended; raises LeaseError (404) where there was none."""
        if batch_id not in self.closed:
            wanted = "an id that GET /batch?lease=SECONDS gave"
            raise LeaseError(404, Problem("batch_id", got=batch_id, wanted=wanted), "batch_id")
        return self.closed[batch_id]

    def _expired(self, batch_id: str) -> tuple[int, ...]:
        """Groups of a lease that ran out, none of which anybody has been given since.

        Raises:
            LeaseError: it is unknown (404), or ended otherwise (409).
        """
        closed = self._end_of(batch_id)
        if closed.how != "expired" or not all(each in self.line.groups for each in closed.groups):
            raise _refusal(batch_id, closed)
        return closed.groups

    def _put_run(self, run: Run) -> None:
        self.run = run
        self.version += 1
        self.journal.put("run", 0, run)


def _goes_on_as(former: Environment, request: wire.RegisterEnv) -> bool:
    """Whether an environment has left and has the name of one that registers."""
    was_killed = request.process is not None and former.request.process == request.process
    has_left = was_killed or not former.alive or former.restored
    # With a reservation, the queue keeps an environment's groups in separate lanes.
    same_lanes = former.reserves == (request.min_batch_allocation is not None)
    return has_left and same_lanes and former.request.desired_name == request.desired_name


def _refusal(batch_id: str, closed: Closed) -> LeaseError:
    """What a client hears that comes too late (409)."""
    return LeaseError(409, Problem(f"batch {batch_id}", summary=_ENDED[closed.how]), "batch_id", closed.how)
