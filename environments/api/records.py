"""What the rollout queue remembers and refuses, and the journal it is written down in."""

from dataclasses import asdict
from typing import TypeVar

from msgspec import Struct

from environments.api import wire
from grpo_common.errors import Problem, UserError

R = TypeVar("R")


class StoreError(UserError):
    """The store cannot be opened, read or written."""


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


class Environment(Struct):
    """A registered environment.

    Attributes:
        connected: until it says goodbye.
        alive: it is connected and was heard of lately: its reservation holds, and it may buffer groups.
        heard, posted: when it was last heard of and last posted a group.
        received: groups from it since the API's start.
        follows: it waits for news.
        restored: an earlier API process wrote it down, and it was not heard of since.
    """

    id: int
    name: str
    request: wire.RegisterEnv
    connected: bool = True
    alive: bool = False
    heard: float = 0.0
    posted: float = 0.0
    received: int = 0
    follows: bool = False
    restored: bool = False

    @property
    def reserves(self) -> bool:
        """It asked for a minimum allocation: its groups have separate lanes."""
        return self.request.min_batch_allocation is not None


class Run(Struct, frozen=True):
    """The trainer's registration and how far it is.

    `started` from its first GET /batch on; `next_group` is the lowest group id that was never given when the last batch
    was acknowledged, as its groups are not written down any more.
    """

    trainer: wire.Register
    uuid: int
    current_step: int
    started: bool = False
    next_group: int = 0

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


class Journal:
    """Records by kind and key, as they were last put: nowhere here, for a queue in memory only.

    All changes of one call of the queue belong in one transaction.
    """

    def all(self, kind: str, record: type[R]) -> dict[int | str | bytes, R]:
        """Return the records of a kind, those that were put last at the end."""
        return {}

    def put(self, kind: str, key: int | str | bytes, record: object) -> None:
        """A record is new or has changed."""

    def delete(self, kind: str, key: int | str | bytes) -> None:
        """A record is not needed any more."""

    def reset(self) -> None:
        """Delete everything."""

    def damaged(self, reason: object) -> StoreError:
        """Return the error that what is written down cannot be read."""
        return StoreError(got=reason)
