"""`/bridge/update/…`: the fence around a write of shared weights."""

from typing import Literal

import msgspec

InFlight = Literal["keep", "recompute", "abort"]
"""What happens to in-flight requests while shared weights change: they continue with their KV cache (keep), continue
after their KV cache is recomputed with the new weights (recompute), or are aborted (abort)."""


class UpdateBeginRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /bridge/update/begin`: hold generation, because the trainer is about to write the shared weights.

    `boot_id` must be the server's own (409 otherwise). An update that has not ended after `timeout_s` counts as torn:
    the trainer is presumed dead, and generation is refused until a whole update has completed.
    """

    boot_id: str
    in_flight: InFlight = "keep"
    timeout_s: float = 60.0


class UpdateBeginResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Sent when no forward pass runs any more. `token` names the update; `pause_seconds` is how long the pause took."""

    token: str
    pause_seconds: float


class UpdateEndRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`POST /bridge/update/end`: the weights are those of `version`; generation resumes with a new prefix cache.

    Any version is accepted, also an older one. A negative version (`PROOF_VERSION`) says that the weights are not a
    policy's: a trainer writes such weights to prove that the server uses them, and then restores the old ones.

    With `torn` the state of the weights is unknown: generation is refused (503) until an update has ended without
    `torn`.
    """

    token: str
    version: int
    torn: bool = False


class UpdateEndResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`stall_seconds`: time from the pause until generation resumed."""

    policy_version: int
    stall_seconds: float
