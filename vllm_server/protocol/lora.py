"""`/lora/…`: publish adapters, and show slots."""

from typing import Any, Final, Literal

import msgspec

Transport = Literal["disk", "memory", "cuda_ipc", "nccl"]
"""How an adapter's tensors reach the engine: a folder, the request's body, the trainer's GPU memory, or a broadcast
between GPUs. All four have one layout, that of a safetensors file (`vllm_server.protocol.flat`)."""

SAFETENSORS_MEDIA_TYPE: Final = "application/x-safetensors"
"""Content type of a `/lora/load` whose body is the adapter; name, version and activate are in the query string."""


class LoraLoadRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`POST /lora/load`: publish an adapter.

    The adapter is the PEFT checkpoint at `adapter_path` (a folder that the server can read), the current content of an
    open `channel`, or the request's body of safetensors bytes.

    The default name is `version_name(lora_name, version)`. The default version is the one in the name, or else one more
    than the highest. A name that was used before is refused (409), because it is the key of caches.

    With `activate: false` only requests that name the adapter get it, until it is unloaded. That serves to try an
    adapter on a server that others use.

    `request_id` is chosen by the publisher and identifies this publish. If no answer arrived and the publisher repeats
    the request with the same id, it gets the answer of the first.
    """

    adapter_path: str | None = None
    channel: str | None = None
    adapter_name: str | None = None
    version: int | None = None
    activate: bool = True
    request_id: str | None = None


class LoraLoadResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Sent when the adapter is in the engine and every new request gets it.

    `load_seconds` is the time in the engine; generation was held for `stall_seconds` of it. `slot` is the adapter's
    place in the engine. `replayed` says that recorded copies wrote the slot (the first adapter of its shapes in a slot
    goes through vLLM's own code). `unloaded` names the versions that are removed to make room.
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

    `handle` is the result of `torch.UntypedStorage._share_cuda_()`, its bytes in base64. The first `nbytes` of the
    storage are the tensors' data. `header` is the layout (the header of a safetensors file), in base64.
    """

    gpu_uuid: str
    handle: list[int | bool | str]
    nbytes: int
    header: str
    adapter_config: dict[str, Any]


class NcclChannel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="nccl"):
    """`POST /lora/channel`: an NCCL communicator of the trainer (rank 0) and all of the engine's workers.

    `unique_id` is `ncclUniqueId` in base64, `nbytes` the size of one publish's broadcast, `header` as above.
    """

    unique_id: str
    world_size: int
    gpu_uuid: str
    nbytes: int
    header: str
    adapter_config: dict[str, Any]


ChannelRequest = CudaIpcChannel | NcclChannel


class ChannelResponse(msgspec.Struct, frozen=True):
    """Answer of `/lora/channel`: the value for `LoraLoadRequest.channel`."""

    channel: str


class ChannelCloseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /lora/channel/close`: release the trainer's memory or communicator; `POST /bridge/weights/close`: free the
    channel's memory. A channel that is not open counts as closed."""

    channel: str


class LoraUnloadRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`POST /lora/unload`: withdraw `adapter_name` (by default the active one)."""

    adapter_name: str | None = None


class LoraUnloadResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`previous_*` is the withdrawn version (null if there was none).

    `status` is "draining" while in-flight requests use it: the engine removes it after the last of them.
    `policy_version` is the version that new requests get now.
    """

    status: Literal["success", "draining"]
    previous_adapter: str | None
    previous_name: str | None
    policy_version: int


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A version in the engine. `draining`: no new request gets it, and it is removed after its last request."""

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
