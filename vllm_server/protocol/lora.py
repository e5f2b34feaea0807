"""`/lora/…`: adapters are published, and slots looked at."""

from typing import Any, Final, Literal

import msgspec

Transport = Literal["disk", "memory", "cuda_ipc", "nccl"]
"""How an adapter's tensors come to the engine: a folder, the body of the request, the trainer's own GPU memory, or a
broadcast between GPUs. All four carry one layout, that of a safetensors file (`vllm_server.protocol.flat`)."""

SAFETENSORS_MEDIA_TYPE: Final = "application/x-safetensors"
"""Content type of a `/lora/load` whose body is the adapter itself; name, version and activate are in the query."""


class LoraLoadRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`POST /lora/load`: publish the PEFT checkpoint at `adapter_path` (a folder that the server can read), or what
    lies in an open `channel` now. With a body of safetensors bytes neither is said.

    Without a name it is `version_name(lora_name, version)`; without a version it is the one in the name, or
    else one more than the highest. A name that was used before is refused (409): caches are keyed by it.

    With `activate: false` only requests that name it get it, until it is unloaded: for trying an adapter on a
    server that others use.

    `request_id`, of the publisher's own making, names this publish: sent again with the same one, because no answer
    came, it gets the answer of the first.
    """

    adapter_path: str | None = None
    channel: str | None = None
    adapter_name: str | None = None
    version: int | None = None
    activate: bool = True
    request_id: str | None = None


class LoraLoadResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Sent once the adapter is in the engine and every new request gets it.

    `load_seconds` is the engine's part of it, of which generation stood still for `stall_seconds`; `slot` is its place
    among the engine's adapters; `replayed` says that the slot was written by copies recorded before (the first adapter
    of its shapes in a slot goes through vLLM's own code). `unloaded` names the versions that leave to make room.
    """

    status: Literal["success"] = "success"
    adapter_path: str
    adapter_name: str
    adapter_id: int
    load_count: int
    adapter_config: dict[str, Any]
    policy_version: int
    transport: Transport
    slot: int
    replayed: bool
    load_seconds: float
    stall_seconds: float
    unloaded: list[str]


class CudaIpcChannel(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="cuda_ipc"
):
    """`POST /lora/channel`: the trainer's packed adapter, in GPU memory that the engine maps.

    `handle` is what `torch.UntypedStorage._share_cuda_()` gave, its bytes in base64; the storage's first `nbytes` are
    the tensors' data. `header` is the layout (the header of a safetensors file), in base64.
    """

    gpu_uuid: str
    handle: list[int | bool | str]
    nbytes: int
    header: str
    adapter_config: dict[str, Any]


class NcclChannel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="nccl"):
    """`POST /lora/channel`: a NCCL communicator of the trainer (rank 0) and all of the engine's workers.

    `unique_id`: base64 of `ncclUniqueId`; `nbytes`: how much one publish broadcasts; `header` as above.
    """

    unique_id: str
    world_size: int
    gpu_uuid: str
    nbytes: int
    header: str
    adapter_config: dict[str, Any]


ChannelRequest = CudaIpcChannel | NcclChannel


class ChannelResponse(msgspec.Struct, frozen=True):
    """Answer of `/lora/channel`: what `LoraLoadRequest.channel` says from now on."""

    channel: str


class ChannelCloseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /lora/channel/close`: let go of the trainer's memory or communicator. Unknown ones are closed."""

    channel: str


class ChannelCloseResponse(msgspec.Struct, frozen=True):
    """Answer of `/lora/channel/close`."""

    status: Literal["closed"] = "closed"


class LoraUnloadRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`POST /lora/unload`: withdraw `adapter_name` (by default the active one)."""

    adapter_name: str | None = None


class LoraUnloadResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`previous_*` is what was withdrawn (null if nothing was loaded).

    `status` is "draining" while requests still run on it: it leaves the engine with the last of them.
    `policy_version` is the version that new requests get from now on.
    """

    status: Literal["success", "draining"]
    previous_adapter: str | None
    previous_name: str | None
    policy_version: int


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One version that the engine holds. `draining`: no new request gets it, it leaves with its last one.

    `unhealthy`: why requests for it are refused (null: they are not).
    """

    name: str
    version: int
    adapter_id: int
    adapter_path: str
    slot: int
    in_flight: int
    served: int
    age_seconds: float
    active: bool
    draining: bool
    unhealthy: str | None = None


class LoraStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /lora/status`."""

    lora_available: bool
    active_adapter_path: str | None
    active_adapter_name: str | None
    active_adapter_id: int | None
    load_count: int
    available_adapters: list[str]
    policy_version: int
    versions: list[VersionStatus]
