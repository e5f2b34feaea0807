"""How the rollout API refuses: requests with a 4xx, and a start or a store that can't be used."""

from dataclasses import asdict

from environments.api import wire
from grpo_common.errors import Problem, UserError


class SettingsError(UserError, ValueError):
    """Settings that can't go together, or an address that can't be had."""


class StoreError(UserError):
    """The store can't be opened, read or written."""


class ApiError(UserError):
    """A request that is refused, with its HTTP status (4xx).

    `key` is that of the request at fault, if it can be named: the wire calls it `field`. `reason` says how the lease
    that the request is about has ended. `retry_s` are the seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        problem: Problem,
        key: str | None = None,
        reason: wire.LeaseEnd | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(**asdict(problem))
        self.status = status
        self.key = key
        self.reason: wire.LeaseEnd | None = reason
        self.retry_s = retry_s

    def response(self) -> wire.ErrorResponse:
        """Return the body that the client gets."""
        return wire.ErrorResponse(detail=str(self), field=self.key, reason=self.reason)
