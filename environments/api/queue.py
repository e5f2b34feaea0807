"""The rollout queue as a pure state machine: groups in, leased batches out, each group trained once.

No clock, no I/O: calls that time matters to are given `now` (seconds of a clock that nobody sets), and what must
survive a crash is written to a `Journal`. A group is in one place at a time:

    offered -> buffered (of an odd size) -> queued -> leased -> gone (acknowledged)
                                              ^          |
                                              +----------+  released, expired, taken over: back where it was

A lease of a trainer that says who it is does not run out by itself: out of reach, it may be training on it all the
while, and must not be given the same groups a second time. It ends when a trainer registers.
"""

import secrets
from collections import Counter
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from environments.api import wire
from environments.api.leases import LeaseBook, refusal
from environments.api.line import Line
from environments.api.records import (
    Closed,
    Environment,
    Group,
    Journal,
    Lease,
    LeaseError,
    NotRegistered,
    Run,
    Snapshot,
    UnknownEnvironment,
)
from environments.api.selection import Pool, Reservation, choose, feasible_minima
from grpo_common.errors import Problem


class Grant(Struct, frozen=True):
    """A batch for the trainer."""

    lease: Lease
    groups: list[Group]


class RolloutQueue:
    """Groups waiting to be trained, the environments that send them and the trainer that takes them."""

    def __init__(self, journal: Journal | None = None, env_timeout: float = 60.0) -> None:
        """`env_timeout`: seconds after which an environment that was not heard of loses its reservation."""
        self.journal = journal or Journal()
        self.env_timeout = env_timeout
        self.next_group = 0
        self.changes = 0
        self.news = 0
        self._clear()

    def _clear(self) -> None:
        self.run: Run | None = None
        self.environments: list[Environment] = []
        self.names: Counter[str | None] = Counter()
        self.last_heard: dict[int, float] = {}
        self.last_posted: dict[int, float] = {}
        self.last_granted = 0.0
        self.alive: set[int] = set()
        self.followers: set[int] = set()  # wait for news
        self.unheard: set[int] = set()  # written down by an earlier API process, and not heard of since
        self.received: Counter[int] = Counter()
        self.line = Line()
        self.buffers: dict[int, list[Group]] = {}
        self._buffered_bytes = 0
        self.leased: dict[int, Group] = {}
        self.leases = LeaseBook(self.journal)
        self.changes += 1  # never back to an earlier number: answers are kept by it
        self.news += 1
        self._chosen: tuple[int, list[int] | None] = (-1, None)
        self.given_back: list[tuple[int, ...]] = []

    @classmethod
    def restore(cls, snapshot: Snapshot, now: float, journal: Journal, env_timeout: float = 60.0) -> "RolloutQueue":
        """The queue as it was written down. Environments have `env_timeout` to be heard of again."""
        queue = cls(journal, env_timeout)
        queue.run = snapshot.run
        queue.next_group = snapshot.next_group
        queue.leases.restore(snapshot.leases, snapshot.closed, now)
        for environment in snapshot.environments:
            queue.environments.append(environment)
            queue.names[environment.request.desired_name] += 1
            queue.last_heard[environment.id] = queue.last_posted[environment.id] = now
            queue.unheard.add(environment.id)
            if environment.connected:
                queue.alive.add(environment.id)
        for group, place in snapshot.groups:
            if place == "leased":
                queue.leased[group.id] = group
            elif place == "buffer" and group.env_id is not None:
                queue.buffers.setdefault(group.env_id, []).append(group)
                queue._buffered_bytes += group.nbytes
            else:
                queue.line.add(group, queue._reserves(group.env_id))
        return queue

    # The trainer

    def register(self, trainer: wire.Register) -> Run:
        """Start the run, or take it over: the former trainer's leases return, queued groups are kept."""
        started = self.run.started if self.run else False
        uuid = trainer.uuid if trainer.uuid is not None else secrets.randbits(53)
        for batch_id in list(self.leases.held):
            self._return(batch_id, Closed("taken over"))
        run = Run(trainer, uuid, trainer.starting_step, started)
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
        if (held := self.leases.of_request(request)) is not None:
            granted = self.leases.extend(held.batch_id, lease, now)
            return Grant(granted, [self.leased[each] for each in granted.groups])
        ids = self._choice()
        if ids is None:
            return None
        groups = self._take(ids)
        self.changes += 1
        self.last_granted = now
        granted = Lease(secrets.token_hex(8), tuple(ids), lease, request, uuid)
        self._hold(granted, groups, now)
        return Grant(granted, groups)

    def acknowledge(self, batch_id: str, step: int | None = None) -> tuple[int, ...]:
        """The batch is trained: its groups' ids, to be forgotten; none where it was acknowledged before.

        A lease that has expired may still be acknowledged while none of its groups was given out again.

        Raises:
            LeaseError: unknown (404), or given to another meanwhile (409).
        """
        if batch_id in self.leases.held:
            ids = self.leases.held[batch_id].groups
            for each in ids:
                del self.leased[each]
        elif self.leases.over(batch_id).how == "acknowledged":
            return ()
        else:
            ids = self._expired(batch_id)
            self._take(ids)
        assert self.run is not None, "a lease without a run"
        self.changes += 1
        self.journal.drop(ids)
        self.leases.end(batch_id, Closed("acknowledged"))
        self._put_run(replace(self.run, current_step=self.run.current_step + 1 if step is None else step))
        return ids

    def extend(self, batch_id: str, now: float, lease: float, step: int | None = None) -> Lease:
        """Hold a batch until `now + lease`; `step` is the step that training on it has led to.

        A trainer acknowledges what a checkpoint holds, and says with `step` how far it is before there is one. A lease
        that has expired begins again while none of its groups was given out again.

        Raises:
            LeaseError: the lease is unknown (404) or has ended (409).
        """
        if batch_id not in self.leases.held:
            ids = self._expired(batch_id)
            self.changes += 1
            self._hold(Lease(batch_id, ids, lease), self._take(ids), now)
        if step is not None:
            assert self.run is not None, "a lease without a run"
            self._put_run(replace(self.run, current_step=step))
        return self.leases.extend(batch_id, lease, now, trained=step is not None)

    def release(self, batch_id: str) -> None:
        """Put a batch back at once, as a trainer does that stops.

        Raises:
            LeaseError: the lease is unknown (404) or has ended (409), unless by an earlier release.
        """
        if batch_id in self.leases.held:
            self._return(batch_id, Closed("released"))
        elif (closed := self.leases.over(batch_id)).how != "released":
            raise refusal(batch_id, closed)

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
        former = next((each for each in self.environments if self._goes_on_as(each, request)), None)
        if former is None:
            number = self.names[request.desired_name]
            self.names[request.desired_name] += 1
            environment = Environment(len(self.environments), f"{request.desired_name or 'env'}_{number}", request)
            self.environments.append(environment)
        else:
            self._lose(former.id)  # its buffer is of the former group size
            environment = replace(former, request=request, connected=True)
            self.environments[former.id] = environment
        self.journal.put_environment(environment)
        self.last_posted[environment.id] = now
        self.hear(environment.id, now)
        return environment

    def _goes_on_as(self, former: Environment, request: wire.RegisterEnv) -> bool:
        """Whether an environment has left and has the name of one that registers."""
        was_killed = request.process is not None and former.request.process == request.process
        has_left = was_killed or former.id not in self.alive or former.id in self.unheard
        # With a reservation, the queue keeps an environment's groups in separate lanes.
        same_lanes = self._reserves(former.id) == (request.min_batch_allocation is not None)
        return has_left and same_lanes and former.request.desired_name == request.desired_name

    def disconnect(self, env_id: int) -> None:
        """An environment says goodbye: its reservation ends, what it sent stays.

        Raises:
            UnknownEnvironment: never registered.
        """
        environment = replace(self.environment(env_id), connected=False)
        self.environments[env_id] = environment
        self.journal.put_environment(environment)
        self._lose(env_id)

    def hear(self, env_id: int, now: float) -> Environment:
        """Note a sign of life.

        Raises:
            UnknownEnvironment: never registered.
        """
        environment = self.environment(env_id)
        self.last_heard[env_id] = now
        self.unheard.discard(env_id)
        if environment.connected and env_id not in self.alive:
            self.alive.add(env_id)
            self.changes += 1
            self.news += 1
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
        group = Group(
            self.next_group,
            env_id,
            size,
            nbytes,
            mean_score,
            min(span, default=None),
            max(span, default=None),
        )
        self.next_group += 1
        if environment is not None:
            self.last_posted[environment.id] = now
            self.received[environment.id] += 1
            if {size, *self.line.sizes(environment.id)} != {environment.request.group_size}:
                self.news += 1  # in groups of its usual size, the queue may not have grown by one
        if environment is None or size >= environment.request.group_size or env_id not in self.alive:
            self._enqueue(group)
            self.journal.put_group(group, "queue")
            return group, None
        buffer = self.buffers.setdefault(environment.id, [])
        buffer.append(group)
        self._buffered_bytes += group.nbytes
        self.journal.put_group(group, "buffer")
        ids = choose(environment.request.group_size, [Pool([(each.id, each.size) for each in buffer])])
        if ids is not None:
            self._unbuffer(environment.id, set(ids))
        return group, sum(each.size for each in self.buffers.get(environment.id, ()))

    # Time and the end

    def tick(self, now: float) -> None:
        """Let leases run out that are nobody's by name, and silent environments go."""
        for lease in [lease for lease in self.leases.overdue(now) if lease.holder is None]:
            self._return(lease.batch_id, Closed("expired", lease.groups))
        for env_id in [each for each in self.alive if now - self.last_heard[each] > self.env_timeout]:
            self._lose(env_id)

    def reset(self) -> None:
        """Forget everything."""
        self.journal.reset()
        self._clear()

    # What is inside

    def minima(self) -> dict[int, int]:
        """Sequences of each batch that are kept for each living environment with a reservation."""
        if self.run is None:
            return {}
        batch_size = self.run.trainer.batch_size
        reservations = {
            env_id: Reservation(
                int(batch_size * (self.environments[env_id].request.min_batch_allocation or 0)),
                frozenset(self.line.sizes(env_id) | {self.environments[env_id].request.group_size}),
            )
            for env_id in sorted(self.alive)
            if self._reserves(env_id)
        }
        if not reservations:
            return {}
        others = self.line.sizes_outside(reservations)
        others.update(self.environments[each].request.group_size for each in self.alive if each not in reservations)
        return feasible_minima(batch_size, reservations, frozenset(others))

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the groups that no trainer has: queued and buffered ones."""
        return self.line.nbytes + self._buffered_bytes

    @property
    def untrained(self) -> int:
        """Sequences that a trainer holds and has not said to have trained on."""
        held = (each for lease in self.leases.held.values() if not lease.trained for each in lease.groups)
        return sum(self.leased[each].size for each in held)

    @property
    def batch_ready(self) -> bool:
        """Whether the next GET /batch is answered with a batch."""
        return self.run is not None and self._choice() is not None

    def _choice(self) -> list[int] | None:
        """The groups of the next batch; thought over again only after a change."""
        assert self.run is not None, "a batch without a run"
        if self._chosen[0] != self.changes:
            target = self.run.trainer.batch_size
            ids = self._given_back(target) or choose(target, self.line.pools(target, self.minima()))
            self._chosen = (self.changes, ids)
        return self._chosen[1]

    def _given_back(self, target: int) -> list[int] | None:
        """The oldest batch that a trainer gave back: it comes again as it was, whatever else has arrived since."""
        fitting = [ids for ids in self.given_back if sum(self.line.groups[each].size for each in ids) == target]
        return list(min(fitting)) if fitting else None

    def _take(self, ids: Iterable[int]) -> list[Group]:
        """Groups out of the line."""
        taken = self.line.remove(ids)
        out = {group.id for group in taken}
        self.given_back = [each for each in self.given_back if out.isdisjoint(each)]
        self.news += 1
        return taken

    def _reserves(self, env_id: int | None) -> bool:
        return env_id is not None and self.environments[env_id].request.min_batch_allocation is not None

    def _enqueue(self, group: Group) -> None:
        self.line.add(group, self._reserves(group.env_id))
        self.changes += 1

    def _unbuffer(self, env_id: int, ids: set[int]) -> None:
        buffer = self.buffers.pop(env_id)
        for group in buffer:
            if group.id in ids:
                self._enqueue(group)
                self._buffered_bytes -= group.nbytes
        self.journal.move(ids, "queue")
        if rest := [group for group in buffer if group.id not in ids]:
            self.buffers[env_id] = rest

    def _lose(self, env_id: int) -> None:
        """An environment is gone: no batch waits for it, and what it left in its buffer may be trained."""
        self.alive.discard(env_id)
        self.changes += 1
        self.news += 1
        if env_id in self.buffers:
            self._unbuffer(env_id, {group.id for group in self.buffers[env_id]})

    def _return(self, batch_id: str, closed: Closed) -> None:
        """End a lease and put its groups back where their age places them: at the front."""
        lease = self.leases.held[batch_id]
        for each in lease.groups:
            self._enqueue(self.leased.pop(each))
        if closed.how != "expired":
            self.given_back.append(lease.groups)
        self.journal.move(lease.groups, "queue")
        self.leases.end(batch_id, closed)

    def _hold(self, lease: Lease, groups: Iterable[Group], now: float) -> None:
        """Groups that were taken out of the line are now in a trainer's hands."""
        self.leased.update((group.id, group) for group in groups)
        self.journal.move(lease.groups, "leased")
        self.leases.grant(lease, now)

    def _expired(self, batch_id: str) -> tuple[int, ...]:
        """Groups of a lease that ran out, none of which anybody has been given since.

        Raises:
            LeaseError: it is unknown (404), or ended otherwise (409).
        """
        closed = self.leases.over(batch_id)
        if closed.how != "expired" or not all(each in self.line.groups for each in closed.groups):
            raise refusal(batch_id, closed)
        return closed.groups

    def _put_run(self, run: Run) -> None:
        self.run = run
        self.changes += 1
        self.news += 1
        self.journal.put_run(run)
