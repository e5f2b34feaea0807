"""`/bridge/update/…`: the fence around a write of shared weights."""

from typing import Literal

import msgspec

InFlight = Literal["keep", "recompute", "abort"]
"""What becomes of requests that run while shared weights change: they go on as they are (keep), go on after the cache
of what they have so far was made anew under the new weights (recompute), or end early (abort)."""


class UpdateBeginRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /bridge/update/begin`: hold generation still, because the shared weights are about to be written.

    `boot_id` must be the server's own (409 otherwise). An update that has not ended after `timeout_s` counts as torn:
    its trainer is taken for dead, and generation is refused until a whole update has ended well.
    """

    boot_id: str
    in_flight: InFlight = "keep"
    timeout_s: float = 60.0


class UpdateBeginResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Sent once no forward pass is under way. `token` names the update; `pause_seconds` is what it took."""

    token: str
    pause_seconds: float


class UpdateEndRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`POST /bridge/update/end`: the weights are those of `version`; generation goes on with a fresh prefix cache.

    Any version will do, an older one again, too: a trainer's proof writes weights that are no policy's
    (`PROOF_VERSION`), and then those of before.

    With `torn` they are in no known state: generation is refused (503) until an update has ended without it. A negative
    version says that they are no policy's, as while a trainer proves that the server uses what it writes.
    """

    token: str
    version: int
    torn: bool = False


class UpdateEndResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`stall_seconds`: from the pause until generation went on."""

    policy_version: int
    stall_seconds: float
