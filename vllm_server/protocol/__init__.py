"""The inference server's HTTP contract with the trainer and the environments.

It imports neither torch nor vLLM, so that both sides can use it. Only `group` and `file_parts` need torch.
Bodies are JSON; encode and decode them with `msgspec.json`. Structs that come *from* a client forbid unknown fields.
Structs that go *to* a client may get new fields, so readers must ignore unknown fields, as msgspec does.

Versions. The policy is published as numbered versions, each with a name that a server process never uses twice:
`<lora-name>-v<N>`. Version 0 is the base model, until an adapter is published as version 0. A request that names no
adapter gets the version published last, and every answer names its version.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from grpo_common.errors import Problem
from vllm_server.protocol.channels import Transport, WeightTransport
from vllm_server.protocol.routed_experts import RoutedShape

# ----------------------------------------------------------------------------------------------------------------------
# Routes and headers of the server, and defaults that its clients know.

DEFAULT_PORT: Final = 9001

CPU_CACHE_BYTES: Final = 512 << 20
"""Size of the key-value cache on a CPU. vLLM's default is a share of all memory, and vLLM allocates it at start."""

WORKER_QUEUE_BYTES: Final = 512 << 20
"""Free bytes of /dev/shm that are enough for vLLM's queues to a worker's own process, which take 160 and 240 MiB."""

VERSION_HEADER: Final = "x-policy-version"
"""Response header of vLLM's /v1 completion routes: the version that answered."""

VERSION_END_HEADER: Final = "x-policy-version-end"
"""A second header if shared weights changed during the request: the version at its end. The answer is then a mixture of
both. Streams do not have it, because their headers are sent first."""

GENERATE_ROUTE: Final = "/generate"
HEALTH_ROUTE: Final = "/health"
HEALTH_GENERATE_ROUTE: Final = "/health_generate"
LORA_LOAD_ROUTE: Final = "/lora/load"
LORA_UNLOAD_ROUTE: Final = "/lora/unload"
LORA_STATUS_ROUTE: Final = "/lora/status"
CHANNELS_ROUTE: Final = "/channels"
CHANNELS_CLOSE_ROUTE: Final = "/channels/close"
BRIDGE_INFO_ROUTE: Final = "/bridge/info"
BRIDGE_IS_PAUSED_ROUTE: Final = "/bridge/is_paused"
BRIDGE_PAUSE_ROUTE: Final = "/bridge/pause"
BRIDGE_RESUME_ROUTE: Final = "/bridge/resume"
BRIDGE_SLEEP_ROUTE: Final = "/bridge/sleep"
BRIDGE_WAKE_UP_ROUTE: Final = "/bridge/wake_up"
BRIDGE_IS_SLEEPING_ROUTE: Final = "/bridge/is_sleeping"
BRIDGE_STATE_DICT_INFO_ROUTE: Final = "/bridge/state_dict_info"
BRIDGE_DEBUG_ROUTE: Final = "/bridge/debug"
BRIDGE_LIST_ENDPOINTS_ROUTE: Final = "/bridge/list_endpoints"
BRIDGE_UPDATE_BEGIN_ROUTE: Final = "/bridge/update/begin"
BRIDGE_UPDATE_END_ROUTE: Final = "/bridge/update/end"
BRIDGE_WEIGHTS_STAGE_ROUTE: Final = "/bridge/weights/stage"
BRIDGE_WEIGHTS_APPLY_ROUTE: Final = "/bridge/weights/apply"
BRIDGE_CHECKSUMS_ROUTE: Final = "/bridge/checksums"


# ----------------------------------------------------------------------------------------------------------------------
# The version of vLLM, names of the policy's versions, and ranks of adapters.


VLLM_RUN: Final = "0.32"
"""The version of vLLM that this project was run with. Older ones are refused, newer ones cause a warning."""

DEFAULT_LORA_NAME: Final = "policy"
DEFAULT_KEEP_VERSIONS: Final = 4

SPARE_ADAPTERS: Final = 4
"""Slots besides those of kept versions: for the adapter being loaded, and for old versions that still have in-flight
requests."""

LEGAL_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as `--max-lora-rank`; adapters of any rank up to it can be loaded."""

HIGHEST_VERSION: Final = 2**53
"""Every JSON reader represents numbers up to this one exactly."""

LONGEST_NAME: Final = 256
"""Limit of an adapter's name, in characters."""

PROOF_VERSION: Final = -1
"""Version of shared weights while a trainer proves that the server sees its writes: they are not a policy's."""


def version_name(lora_name: str, version: int) -> str:
    """Return the adapter's name for a policy version: `version_name("policy", 3) == "policy-v3"`."""
    return f"{lora_name}-v{version}"


def parse_version(name: str, lora_name: str) -> int | None:
    """Return the version in a name made by `version_name`, or None for any other name."""
    number = name.removeprefix(f"{lora_name}-v")
    if number == name or not (number.isascii() and number.isdigit() and len(number) <= 18):
        return None
    version = int(number)
    return version if version_name(lora_name, version) == name else None  # "policy-v03" names no version


def servable_rank(rank: int) -> int:
    """Return the smallest legal `--max-lora-rank` that holds adapters of `rank`. Raise a ValueError if none does."""
    for legal in LEGAL_LORA_RANKS:
        if 1 <= rank <= legal:
            return legal
    ranks = ", ".join(map(str, LEGAL_LORA_RANKS))
    raise ValueError(f"LoRA rank: got {rank}, wanted 1 to {LEGAL_LORA_RANKS[-1]} (served as {ranks}); choose one")


# ----------------------------------------------------------------------------------------------------------------------
# `/bridge/…`: identity and state of the server.


FORMAT = 1
"""Number of the format of all messages between server and clients."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engine's workers: on a CPU `gpu_uuid` is empty; `visible_gpus` are those that its process may use;
    `routed_experts` is what it records of a mixture of experts, if anything."""

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
    paused: bool


class PauseRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """`POST /bridge/pause`. `mode`: freeze in-flight requests (keep), wait for them, or abort them."""

    mode: Literal["keep", "wait", "abort"] = "keep"


class BridgeStatus(msgspec.Struct, frozen=True):
    """Answer of `/bridge/pause`, `/bridge/resume`, `/bridge/sleep`, `/bridge/wake_up` and
    `/channels/close`."""

    status: Literal["paused", "resumed", "asleep", "awake", "closed"]


class SleepingState(msgspec.Struct, frozen=True):
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


# ----------------------------------------------------------------------------------------------------------------------
# `POST /generate`: tokens in, tokens and their logprobs out.


class TokenPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tokenised prompt; `prompt_token_ids` must not be empty."""

    prompt_token_ids: list[int]


ROUTING_KEYS: Final = ("prompt", "stream", "model", "policy_version")
"""Keys of `POST /generate` that are no sampling parameters."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate`. On the wire the body is flat: the keys of `sampling` are next to `prompt`.

    `sampling` holds vLLM's SamplingParams by their own names (`n`, `max_tokens`, `temperature`, `stop`, `seed`,
    `logprobs`, `prompt_logprobs`, …). `model` or `policy_version` selects a version. Without them, or with the served
    model's name, the newest version answers.
    """

    prompt: str | TokenPrompt
    stream: bool = False
    model: str | None = None
    policy_version: int | None = None
    sampling: dict[str, Any] = {}

    def to_body(self) -> dict[str, Any]:
        """Return the flat JSON object for the wire."""
        routing = {"stream": self.stream or None, "model": self.model, "policy_version": self.policy_version}
        given = {key: value for key, value in routing.items() if value is not None}
        return self.sampling | {"prompt": msgspec.to_builtins(self.prompt)} | given

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> "GenerateRequest":
        """Return the request in a flat body. Any sampling key is accepted here, because the known ones depend on vLLM.

        Raises:
            msgspec.ValidationError: a routing key is missing or has the wrong type; the message names it.
        """
        routing = {key: body[key] for key in ROUTING_KEYS if key in body}
        sampling = {key: value for key, value in body.items() if key not in ROUTING_KEYS}
        return msgspec.convert(routing | {"sampling": sampling}, cls)


TokenLogprobs = dict[int, float]
"""Maps a token id (a string on the wire) to its logprob, natural log, in the distribution that was sampled from."""


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of `/generate`; lists run over the `n` completions.

    `logprobs[out][pos]` is a list of one object `{"<token id>": logprob}` whose first key is the sampled token. With
    `logprobs: 0` it is the only key; with `logprobs: k` the k likeliest tokens follow. `prompt_logprobs[pos]` is null
    at the first position. `token_ids` includes the stop token if one ended the completion. `policy_version` is the
    version at the request's start. If shared weights changed during the request, `policy_version_end` is the version at
    its end, and the completions are a mixture of both.
    `routed_experts` (base64 in JSON; `protocol/routed_experts.py`) has for each completion the experts of all tokens,
    prompt included, but for the last; it is absent unless the server was started with `--return-routed-experts`.
    """

    text: list[str]
    prompt: str | None
    finish_reasons: list[str | None]
    policy_version: int
    model: str
    prompt_token_ids: list[int]
    token_ids: list[list[int]]
    logprobs: list[list[list[TokenLogprobs]]] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    policy_version_end: int | None = None
    routed_experts: list[bytes] | None = None


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a streamed `/generate` (newline-delimited JSON): the new tokens of completion `index`.

    `finish_reason` is set in a completion's last chunk. `policy_version_end` is set if shared weights have changed
    since the request began: the version at that moment.
    """

    index: int
    text: str
    token_ids: list[int]
    policy_version: int
    model: str
    finish_reason: str | None = None
    logprobs: list[list[TokenLogprobs]] | None = None
    policy_version_end: int | None = None


# ----------------------------------------------------------------------------------------------------------------------
# `/lora/…`: publish adapters, and show slots.


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
    transport: Transport | WeightTransport
    slot: int
    replayed: bool
    load_seconds: float
    stall_seconds: float
    unloaded: list[str]


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


# ----------------------------------------------------------------------------------------------------------------------
# Which adapters are served: decided from PEFT's `adapter_config.json` alone, by both sides. The server refuses an
# adapter that it cannot serve, and the trainer refuses to start with it. The table follows vLLM 0.32
# (`vllm/lora/peft_helper.py`). It has the fields that vLLM refuses, and the fields that vLLM ignores and would
# therefore serve wrongly.


SERVABLE: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "peft_type": (("LORA",), "train a LoRA adapter, or merge this one into the model"),
    "task_type": (("CAUSAL_LM", None), "train it on the model with its language head, not with a classification head"),
    "bias": (("none", None), "train with bias='none'"),
    "use_dora": ((False, None), "train with use_dora=False"),
    "lora_bias": ((False, None), "train with lora_bias=False"),
    "modules_to_save": ((None, []), "train without modules_to_save"),
    "alora_invocation_tokens": ((None, []), "train without activated LoRA"),
    "layer_replication": ((None, []), "train without layer_replication"),
    "target_parameters": ((None, []), "train target_modules only"),
    "use_qalora": ((False, None), "train with use_qalora=False"),
    "use_bdlora": ((None, {}), "train without block-diagonal LoRA"),
    "kasa_config": ((None, {}), "train without KaSA (it changes the base model)"),
    "arrow_config": ((None, {}), "train without Arrow routing"),
    "monteclora_config": ((None, {}), "train without MonteCLoRA"),
    "init_lora_weights": (
        (True, False, None, "gaussian", "eva", "orthogonal"),
        "convert it to a plain LoRA (this initialisation changes the base model)",
    ),
    "trainable_token_indices": ((None, []), "train without trainable tokens"),
    "alpha_pattern": ((None, {}), "train with one lora_alpha for all modules"),
    "rank_pattern": ((None, {}), "train with one rank for all modules"),
}
"""Maps a field of `adapter_config.json` to (its servable values, the fix for any other value)."""


def refusals(adapter_config: Mapping[str, Any], max_rank: int) -> list[Problem]:
    """Return everything in an `adapter_config.json` that cannot be served, the worst first; empty if it is servable.

    A missing field has a servable default. `max_rank` is the server's `--max-lora-rank`.
    """
    found = []
    for field, (servable, fix) in SERVABLE.items():
        if field in adapter_config and adapter_config[field] not in servable:
            wanted = " or ".join(json.dumps(value) for value in servable)
            found.append(Problem(field, got=json.dumps(adapter_config[field]), wanted=wanted, fix=fix))
    rank = adapter_config.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= max_rank:
        fix = "train with a smaller rank or start the server with a larger --max-lora-rank"
        found.append(Problem("r", got=str(rank), wanted=f"1 to {max_rank}, this server's --max-lora-rank", fix=fix))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# `/bridge/update/…`: the fence around a write of shared weights.


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


# ----------------------------------------------------------------------------------------------------------------------
# `/bridge/weights/…`: all weights of a policy, sent into a running server.
#
# For each version the trainer has the server receive the weights by the open channel (`channels`) and write them within
# the fence of `/bridge/update/…`. Weights have the names and shapes of the model's checkpoint:
#
#     staged      stage ─▶ update/begin ─▶ apply ─▶ update/end      received while the server generates
#     not staged           update/begin ─▶ apply ─▶ update/end      received while generation is held


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
    """The answer of a worker, and of the server: the slowest worker's time, and whether all replayed.

    `replayed`: the copies of an earlier version were repeated.
    """

    seconds: float
    replayed: bool = False
