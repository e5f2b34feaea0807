"""What the rollout queue remembers and refuses, and the journal it is written down in."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Literal

from msgspec import Struct

from environments.api import wire
from grpo_common.errors import Problem, UserError

Place = Literal["buffer", "queue", "leased"]


class NotRegistered(UserError):
    """A batch was asked for before any trainer registered."""


class ApiError(UserError):
    """A request that is refused, with its HTTP status (4xx).

    `key` is that of the request at fault, where it can be named: what the wire calls `field`. `reason` is the end of
    the lease that the request was about.
    """

    def __init__(
        self, status: int, problem: Problem, key: str | None = None, reason: wire.LeaseEnd | None = None
    ) -> None:
        super().__init__(**asdict(problem))
        self.status = status
        self.key = key
        self.reason: wire.LeaseEnd | None = reason

    def response(self) -> wire.ErrorResponse:
        """The body that the client gets."""
        return wire.ErrorResponse(detail=str(self), field=self.key, reason=self.reason)


class UnknownEnvironment(ApiError, LookupError):
    """An env_id that this API has not given out."""


class QueueFull(ApiError):
    """As many groups wait as may; the post is refused (429), and may be repeated after `RETRY_AFTER_S` seconds."""

    RETRY_AFTER_S = 5  # a trainer that is alive has taken a batch by then, as a rule


class LeaseError(ApiError):
    """A lease that cannot be had, acknowledged, extended or released: unknown (404), or ended (409)."""


class Group(Struct, frozen=True):
    """What the queue knows of a group; its bytes lie elsewhere (`environments.api.payloads`).

    Ids count up in order of arrival, so the lowest id is the oldest group. `size` is in sequences.
    """

    id: int
    env_id: int | None
    size: int
    nbytes: int
    mean_score: float
    oldest_version: int | None = None
    newest_version: int | None = None


class Environment(Struct, frozen=True):
    """A registered environment; `connected` until it says goodbye."""

    id: int
    name: str
    request: wire.RegisterEnv
    connected: bool = True


class Run(Struct, frozen=True):
    """The trainer's registration and how far it is; `started` from its first GET /batch on."""

    trainer: wire.Register
    uuid: int
    current_step: int
    started: bool = False

    @property
    def over(self) -> bool:
        """The trainer has done all its steps, as far as it said how many there are."""
        return 0 < self.trainer.num_steps <= self.current_step


class Lease(Struct, frozen=True):
    """A batch in a trainer's hands.

    Attributes:
        seconds: that it lasts, from when it was granted or extended. When that was is not written down: a clock of
            another process, or of this one before it was set, says nothing of now.
        request: the client's key for asking again after a lost answer.
        holder: the uuid of the trainer that holds it; None: it did not say who it is, and the lease may run out.
        trained: the trainer has said that it trained on the batch, which it keeps until a checkpoint holds it.
    """

    batch_id: str
    groups: tuple[int, ...]
    seconds: float = 600.0
    request: str | None = None
    holder: int | None = None
    trained: bool = False


class Closed(Struct, frozen=True):
    """How a lease ended; with its groups where it expired, for it may still be acknowledged or extended."""

    how: wire.LeaseEnd
    groups: tuple[int, ...] = ()


class Snapshot(Struct, frozen=True):
    """Everything that a journal wrote down, as `RolloutQueue.restore` wants it."""

    run: Run | None
    environments: list[Environment]
    groups: list[tuple[Group, Place]]
    leases: list[Lease]
    closed: dict[str, Closed]
    next_group: int


class Journal:
    """Where changes are written down: nowhere here, for a queue in memory only.

    All changes of one call of the queue belong in one transaction.
    """

    def put_run(self, run: Run) -> None:
        """The run is now this."""

    def put_environment(self, environment: Environment) -> None:
        """An environment is new or has changed."""

    def put_group(self, group: Group, place: Place) -> None:
        """A group has arrived."""

    def move(self, groups: Iterable[int], place: Place) -> None:
        """Groups are now in this place."""

    def drop(self, groups: Iterable[int]) -> None:
        """Groups are done with."""

    def put_lease(self, lease: Lease) -> None:
        """A lease is new or has been extended."""

    def close_lease(self, batch_id: str, closed: Closed) -> None:
        """A lease has ended."""

    def reset(self) -> None:
        """Everything is gone."""
