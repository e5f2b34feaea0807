"""`/bridge/…`: who the server is, and what it is doing."""

from pathlib import Path
from typing import Literal

import msgspec


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engine's workers. `gpu_uuid` is empty on a CPU; `visible_gpus` are all that its process may use."""

    rank: int
    gpu_uuid: str
    visible_gpus: list[str]


def machine_id() -> str:
    """The same for two processes if they run on one machine, since one boot of it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class BridgeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /bridge/info`: who this server is and what it can take.

    `boot_id` is new for each server process: versions of another boot mean nothing here. `max_lora_rank` is
    null when the server was started without LoRA, `lora_dtype` too. `last_update_time`: Unix seconds, 0.0 before a
    publish. `machine` is the server's `machine_id()`; `bridge_config_path` is set while weights are shared.
    `logits_dtype`: of those that logprobs come from; null if it is not known. `max_num_seqs`: sequences that the engine
    works on at once, at most; null: an older server.
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


class PausedState(msgspec.Struct, frozen=True):
    """`GET /bridge/is_paused`."""

    paused: bool


class PauseRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """`POST /bridge/pause`: what becomes of running requests: frozen, waited for, or ended early."""

    mode: Literal["keep", "wait", "abort"] = "keep"


class BridgeStatus(msgspec.Struct, frozen=True):
    """Answer of `/bridge/pause`, `/bridge/resume`, `/bridge/sleep` and `/bridge/wake_up`."""

    status: Literal["paused", "resumed", "asleep", "awake"]


class SleepingState(msgspec.Struct, frozen=True):
    """`GET /bridge/is_sleeping`."""

    sleeping: bool


class ParameterInfo(msgspec.Struct, frozen=True):
    """A parameter in the engine; `dtype` by torch's name without `torch.`."""

    shape: list[int]
    dtype: str


class StateDictInfo(msgspec.Struct, frozen=True):
    """`GET /bridge/state_dict_info`: the model's parameters by vLLM's names, tied ones under each of theirs."""

    num_params: int
    params: dict[str, ParameterInfo]


class BridgeDebug(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /bridge/debug`: what holds generation, and since when. `fault` says why it is refused, if it is."""

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
