"""`/bridge/…`: identity and state of the server."""

from pathlib import Path
from typing import Literal

import msgspec

from vllm_server.protocol.routed_experts import RoutedShape

FORMAT = 1
"""Number of the format of all messages between server and clients."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engine's workers.

    `gpu_uuid` is empty on a CPU; `visible_gpus` lists the GPUs that its process may use; `routed_experts`: what it
    records of a mixture of experts, if anything.
    """

    rank: int
    gpu_uuid: str
    visible_gpus: list[str]
    routed_experts: RoutedShape | None = None


def machine_id() -> str:
    """Return the id of this machine's current boot; it is equal for all processes of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class BridgeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /bridge/info`: identity and limits of this server.

    `boot_id` is new for each server process: versions of another boot are unknown here. `max_lora_rank` and
    `lora_dtype` are null if the server was started without LoRA. `last_update_time` is in Unix seconds, 0.0 before a
    publish. `machine` is the server's `machine_id()`. `bridge_config_path` is set while weights are shared.
    `logits_dtype` is the dtype of the logits behind logprobs; null for an older server. `max_num_seqs` is the engine's
    limit of concurrent sequences; null for an older server. `receives_weights`: a trainer may send all weights.
    `quantization` is vLLM's name of the method, `kv_cache_dtype` that of the KV cache. `format` is the number of the
    format of all messages between this server and its clients.
    """

    enabled: bool
    shared_weights: bool
    update_count: int
    last_update_time: float
    model_name: str
    served_model_name: str
    device: Literal["cpu", "cuda"]
    dtype: str
    boot_id: str
    pid: int
    policy_version: int
    lora_name: str
    max_lora_rank: int | None
    max_loras: int
    keep_versions: int
    max_model_len: int
    logprobs_mode: str
    vllm_version: str
    lora_dtype: str | None
    machine: str
    workers: list[WorkerInfo]
    bridge_config_path: str | None = None
    logits_dtype: str | None = None
    max_num_seqs: int | None = None
    receives_weights: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    format: int = 1

    @property
    def in_8_bits(self) -> bool:
        """Whether weights or KV cache are coarser than `dtype`."""
        return self.quantization is not None or self.kv_cache_dtype.startswith(("fp8", "int8", "nvfp4"))


class PausedState(msgspec.Struct, frozen=True):
    """`GET /bridge/is_paused`."""

    paused: bool


class PauseRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """`POST /bridge/pause`. `mode`: freeze in-flight requests (keep), wait for them, or abort them."""

    mode: Literal["keep", "wait", "abort"] = "keep"


class BridgeStatus(msgspec.Struct, frozen=True):
    """Answer of `/bridge/pause`, `/bridge/resume`, `/bridge/sleep`, `/bridge/wake_up`, `/bridge/weights/close` and
    `/lora/channel/close`."""

    status: Literal["paused", "resumed", "asleep", "awake", "closed"]


class SleepingState(msgspec.Struct, frozen=True):
    """`GET /bridge/is_sleeping`."""

    sleeping: bool


class ParameterInfo(msgspec.Struct, frozen=True):
    """A parameter in the engine; `dtype` is torch's name without `torch.`."""

    shape: list[int]
    dtype: str


class StateDictInfo(msgspec.Struct, frozen=True):
    """`GET /bridge/state_dict_info`: the model's parameters by vLLM's names, tied ones under each of their names."""

    num_params: int
    params: dict[str, ParameterInfo]


class Checksums(msgspec.Struct, frozen=True):
    """`GET /bridge/checksums`: for each worker, its parameters' checksums by vLLM's names."""

    workers: list[dict[str, int]]


class BridgeDebug(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /bridge/debug`: what holds generation, and for how long. `fault` is the reason if generation is refused."""

    info: BridgeInfo
    uptime_seconds: float
    paused: bool
    updating: bool
    fault: str | None
    last_stall_seconds: float
    in_flight: dict[str, int]


class EndpointList(msgspec.Struct, frozen=True):
    """`GET /bridge/list_endpoints`: every route of the server, as "METHOD /path"."""

    endpoints: list[str]
