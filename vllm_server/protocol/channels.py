"""Channels, by which a trainer's tensors reach the workers: their names, and the request that opens one.

A trainer opens a channel once. It carries either adapters, which `/lora/load` publishes, or all weights, which
`/bridge/weights/…` stages and writes. Tensors travel in buckets, whose layout is that of a safetensors file
(`vllm_server.protocol.flat`): an adapter is one bucket, a model is several. A server has one trainer, so a new channel
replaces the open one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Transport = Literal["disk", "memory", "cuda_ipc", "nccl", "gloo"]
"""How an adapter reaches the workers: a folder, a request's body, the trainer's GPU memory, a broadcast between GPUs,
or one between main memories. `disk` and `memory` open no channel: each request names the folder, or has the bytes."""

WeightTransport = Literal["cuda_ipc", "nccl", "main_memory", "gloo", "disk"]
"""How all weights reach the workers: as above, or mapped from the trainer's main memory."""

Staging = Literal["auto", "on", "off"]
"""Whether all weights are received into a second buffer while the server generates; auto: if there is room."""


class MappedTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor in the trainer's memory: number of its storage, and its place there in elements of its dtype."""

    storage: int
    offset: int
    shape: list[int]
    stride: list[int]
    dtype: str


class CudaIpcSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="cuda_ipc"
):
    """GPU memory of the trainer, which the workers map. It has the present version when a worker is asked for it.

    `storages` are results of `torch.UntypedStorage._share_cuda_()`, their bytes in base64. `tensors` has every tensor
    of the buckets by name, in any float dtype. Without `tensors`, storage n begins with bucket n.
    """

    gpu_uuid: str
    storages: list[list[int | bool | str]]
    tensors: dict[str, MappedTensor] = {}


class MainMemorySpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="main_memory"
):
    """Main memory of the trainer, which the workers map. It has the present version when a worker is asked for it.

    The memory, of `nbytes` bytes, is a Linux memfd: `path` opens it in `/proc`, and `name` is the one that it was made
    with. It is the only storage of `tensors`, which has every tensor of the buckets by name.
    """

    name: str
    path: str
    nbytes: int
    tensors: dict[str, MappedTensor]


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="group"):
    """A group of the trainer, which is rank 0, and all workers. The trainer broadcasts each bucket.

    `meet` is where the ranks meet. nccl: `ncclUniqueId` in base64. gloo: HOST:PORT of the trainer's store.
    """

    backend: Literal["nccl", "gloo"]
    meet: str
    world_size: int


class FolderSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="disk"):
    """A folder with a subfolder for the present version, by its number; in it one safetensors file for each bucket:
    `0.safetensors` and so on. It has its name only while it is complete. Each file's metadata names the version."""

    folder: str


Spec = CudaIpcSpec | MainMemorySpec | GroupSpec | FolderSpec


class ChannelRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /channels`: open a channel; it replaces the open one.

    `boot_id` must be the server's own (409 otherwise). `buckets` has the header of each bucket, in base64.
    `adapter_config` is the adapter_config.json of the adapters to come, by a group or by `cuda_ipc` without `tensors`;
    null: the channel carries all weights, and `staging` says whether they are staged.
    """

    boot_id: str
    spec: Spec
    buckets: list[str]
    adapter_config: dict[str, Any] | None = None
    staging: Staging = "auto"

    @property
    def transport(self) -> Transport | WeightTransport:
        """The option's value for this channel."""
        tag: Any = self.spec.__struct_config__.tag
        return self.spec.backend if isinstance(self.spec, GroupSpec) else tag


class ChannelResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`channel` names it in later requests. `staging_bytes`: memory that each worker has set aside for staging; 0: all
    weights are not staged."""

    channel: str
    staging_bytes: int = 0


class ChannelCloseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /channels/close`: free the channel's memory, or leave its group. One that is not open counts as closed."""

    channel: str
