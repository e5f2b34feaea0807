"""`vllm_bridge_config.json`: where a server's weights are in memory, for a trainer that binds its model to them.

The field names of the Atropos example server are kept; further fields are added. The server writes the file atomically,
for its owner only. The trainer reads it and checks that the server in it runs and has this boot id.

A handle is of one of two kinds. `cuda_ipc` opens a storage in another process's GPU memory. `file` is a place in a file
that both processes map, for the same bridge on a CPU.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

FILE_NAME: Final = "vllm_bridge_config.json"
SCHEMA_VERSION: Final = 1


class ParamMapping(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter in vLLM. `dtype` is torch's name without `torch.`, `device` is torch's text for it."""

    vllm_name: str
    shape: list[int]
    dtype: str
    device: str


class CudaIpcHandle(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="cuda_ipc"):
    """The result of `torch.UntypedStorage._share_cuda_()`, bytes in base64, and the tensor's place in that storage.

    `storage_size` and `storage_offset` are in bytes, `tensor_offset` and `stride` in elements of `dtype`.
    """

    device_index: int
    ipc_handle_b64: str
    storage_size: int
    storage_offset: int
    ref_counter_handle_b64: str
    ref_counter_offset: int
    event_handle_b64: str
    event_sync_required: bool
    shape: list[int]
    dtype: str
    stride: list[int]
    tensor_offset: int


class FileHandle(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="file"):
    """A place in a memory file that both processes map: `offset` in bytes, `stride` in elements."""

    path: str
    offset: int
    shape: list[int]
    dtype: str
    stride: list[int]


Handle = CudaIpcHandle | FileHandle


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of worker `rank` to the server's process: handles by vLLM's names, `device` as torch writes it."""

    rank: int
    handles: dict[str, Handle]
    device: str
    torch_version: str


class RankWeights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of another worker than the first, as in `BridgeConfigFile`. All workers have the same names."""

    rank: int
    param_mappings: dict[str, ParamMapping]
    ipc_handles: dict[str, Handle]
    gpu_uuid: str


class BridgeConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file.

    The keys of `param_mappings` and `ipc_handles` are `param_names`, vLLM's own names. Two names of one tensor (a tied
    output layer) have handles of the same place. `server_url` is where the server listens; `boot_id` is that of
    `/bridge/info`, `machine` its `machine_id()`; `gpu_uuid` is empty on a CPU.

    If several workers have a shard of each weight, `tp_degree` is their number, the fields are those of the first
    worker, and `further_ranks` has the others. A trainer that knows of one worker only refuses the `tp_degree`.
    """

    model: str
    tp_degree: int
    dp_shard_degree: int
    param_names: list[str]
    param_mappings: dict[str, ParamMapping]
    ipc_handles: dict[str, Handle]
    shared_weights_enabled: bool
    single_copy_enabled: bool
    num_params: int
    schema_version: int
    kind: Literal["cuda_ipc", "file"]
    server_url: str
    server_pid: int
    boot_id: str
    machine: str
    gpu_uuid: str
    vllm_version: str
    torch_version: str
    further_ranks: list[RankWeights] = []

    def of_rank(self, rank: int) -> BridgeConfigFile:
        """Return the file with the weights of a worker in place of the first one's."""
        if rank == 0:
            return self
        own = self.further_ranks[rank - 1]
        return msgspec.structs.replace(
            self, param_mappings=own.param_mappings, ipc_handles=own.ipc_handles, gpu_uuid=own.gpu_uuid
        )
