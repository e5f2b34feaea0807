"""The leases of a queue: who holds which batch until when, and how those ended that are over. Pure, as the queue is."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from environments.api import wire
from environments.api.records import Closed, Journal, Lease, LeaseError
from grpo_common.errors import Problem

REMEMBERED_LEASES = 4096
"""Leases that are over and are remembered, so that a repeated or late acknowledgement is understood."""

_ENDED: Final[Mapping[wire.LeaseEnd, str]] = {
    "taken over": "was taken over by another trainer: its groups are trained again",
    "expired": "ran out, and its groups were given to another client: they are trained again",
    "released": "was released: its groups are trained again",
    "acknowledged": "was acknowledged: it is trained",
}


class LeaseBook:
    """Attributes: `held`, leases by batch id; `deadlines`, when they run out, on the clock that `now` is of."""

    def __init__(self, journal: Journal) -> None:
        self.held: dict[str, Lease] = {}
        self.deadlines: dict[str, float] = {}
        self._journal = journal
        self._over: OrderedDict[str, Closed] = OrderedDict()

    def restore(self, leases: Iterable[Lease], over: Mapping[str, Closed], now: float) -> None:
        """What was written down. Leases have all their time again: nobody could extend them without a server."""
        self.held = {lease.batch_id: lease for lease in leases}
        self.deadlines = {lease.batch_id: now + lease.seconds for lease in self.held.values()}
        self._over.update(over)

    def grant(self, lease: Lease, now: float) -> None:
        """A lease begins, or begins again."""
        self._over.pop(lease.batch_id, None)
        self.held[lease.batch_id] = lease
        self.deadlines[lease.batch_id] = now + lease.seconds
        self._journal.put_lease(lease)

    def extend(self, batch_id: str, seconds: float, now: float, *, trained: bool = False) -> Lease:
        """A lease that is held lasts so long from now on; `trained`: its trainer keeps it for a checkpoint only."""
        lease = self.held[batch_id]
        self.deadlines[batch_id] = now + seconds
        extended = replace(lease, seconds=seconds, trained=lease.trained or trained)
        if extended != lease:
            self.held[batch_id] = extended
            self._journal.put_lease(extended)
        return extended

    def end(self, batch_id: str, closed: Closed) -> None:
        """A lease is over."""
        self.held.pop(batch_id, None)
        self.deadlines.pop(batch_id, None)
        self._over[batch_id] = closed
        self._over.move_to_end(batch_id)
        self._journal.close_lease(batch_id, closed)
        while len(self._over) > REMEMBERED_LEASES:
            self._over.popitem(last=False)

    def of_request(self, request: str | None) -> Lease | None:
        """The lease that was granted to this key."""
        return next((each for each in self.held.values() if request is not None and each.request == request), None)

    def overdue(self, now: float) -> list[Lease]:
        """Those whose time is over."""
        return [self.held[batch_id] for batch_id, deadline in self.deadlines.items() if deadline <= now]

    def over(self, batch_id: str) -> Closed:
        """How a lease ended.

        Raises:
            LeaseError: there was none (404).
        """
        if batch_id not in self._over:
            wanted = "an id that GET /batch?lease=SECONDS gave"
            raise LeaseError(404, Problem("batch_id", got=batch_id, wanted=wanted), "batch_id")
        return self._over[batch_id]


def refusal(batch_id: str, closed: Closed) -> LeaseError:
    """What a client hears that comes too late (409)."""
    return LeaseError(409, Problem(f"batch {batch_id}", summary=_ENDED[closed.how]), "batch_id", closed.how)
