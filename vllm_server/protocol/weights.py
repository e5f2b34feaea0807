"""`/bridge/weights/…`: all weights of a policy, sent into a running server.

A trainer opens a channel once, and closes it by a `ChannelCloseRequest`. For each version it has the server receive
the weights and write them within the fence of `/bridge/update/…`:

    staged      stage ─▶ update/begin ─▶ apply ─▶ update/end      received while the server generates
    not staged           update/begin ─▶ apply ─▶ update/end      received while generation is held

Weights have the names and shapes of the model's checkpoint. They travel in buckets, whose layout is that of a
safetensors file (`vllm_server.protocol.flat`).
"""

from typing import Literal

import msgspec

WeightTransport = Literal["cuda_ipc", "nccl", "main_memory", "gloo", "disk"]
"""How weights reach the server: mapped from the trainer's GPU memory, broadcast between GPUs, mapped from the trainer's
main memory, broadcast between the processes' main memories, or in files that both see."""

Staging = Literal["auto", "on", "off"]
"""Whether weights are received into memory of their own while the server generates; auto: if there is room."""


class NcclSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="nccl"):
    """An NCCL communicator of the trainer (rank 0) and the engine's workers; `unique_id` in base64."""

    unique_id: str
    world_size: int


class GlooSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="gloo"):
    """A Gloo group of the trainer (rank 0) and the engine's workers. Its ranks meet at a store of the trainer."""

    host: str
    port: int
    world_size: int


class DiskSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="disk"):
    """A folder with a subfolder for the present version, by its number; in it one safetensors file for each bucket:
    `0.safetensors` and so on. It has its name only while it is complete. Each file's metadata names the version."""

    folder: str


class MappedTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor in the trainer's memory: number of its storage, and its place there in elements of its dtype."""

    storage: int
    offset: int
    shape: list[int]
    stride: list[int]
    dtype: str


class CudaIpcSource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="cuda_ipc"
):
    """The trainer's own parameters, which the engine maps: they have the weights of each version when it is asked for.

    `storages` are results of `torch.UntypedStorage._share_cuda_()`, their bytes in base64. `tensors` has every tensor
    of the buckets by name, in any float dtype.
    """

    gpu_uuid: str
    storages: list[list[int | bool | str]]
    tensors: dict[str, MappedTensor]


class MainMemorySource(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="main_memory"
):
    """Main memory of the trainer, which the engine maps. It has a version's weights when the engine is asked for them.

    The memory, of `nbytes` bytes, is a Linux memfd: `path` opens it in `/proc`, and `name` is the one that it was made
    with. It is the only storage of `tensors`, which has every tensor of the buckets by name.
    """

    name: str
    path: str
    nbytes: int
    tensors: dict[str, MappedTensor]


Source = CudaIpcSource | NcclSource | MainMemorySource | GlooSource | DiskSource


class WeightsOpenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /bridge/weights/open`: open a channel; it replaces the open one.

    `boot_id` must be the server's own (409 otherwise). `buckets` has the header of each bucket, in base64.
    """

    boot_id: str
    source: Source
    buckets: list[str]
    staging: Staging = "auto"


class WeightsOpenResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`staged`: whether versions are staged. `staging_bytes`: memory that each worker has set aside for that."""

    channel: str
    staged: bool
    staging_bytes: int


class WeightsStageRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /bridge/weights/stage`: receive `version` while generation continues; it fails after `timeout_s`."""

    channel: str
    version: int
    timeout_s: float


class WeightsApplyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /bridge/weights/apply`: write the staged version, which must be `version`, or receive and write it,
    within an update.

    `token` is that of the update in progress (409 otherwise). After a failure the weights may be torn: end the update
    with `torn`.
    """

    channel: str
    version: int
    token: str


class WeightsDone(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: the time of the slowest worker. `replayed`: all workers repeated the copies of an earlier version."""

    seconds: float
    replayed: bool = False
