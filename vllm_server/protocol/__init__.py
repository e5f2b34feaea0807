"""What the inference server says and hears: the contract between it, the trainer and the environments.

Imports neither torch nor vLLM, so that both sides may read it. Bodies are JSON; encode and decode them
with `msgspec.json`. Every struct that comes *from* a client refuses unknown fields; every struct that goes
*to* one may grow, so readers must (and msgspec does) ignore fields they do not know.

Versions. The policy is published as numbered versions, each under a name that is never used twice within
the life of a server process: `<lora-name>-v<N>`. Version 0 is the base model, until an adapter is published
as version 0. A request that names no adapter is answered by the version published last, and every answer
says by which.
"""

from pathlib import Path
from typing import Any, Final, Literal

import msgspec

DEFAULT_PORT: Final = 9001
DEFAULT_LORA_NAME: Final = "policy"
DEFAULT_KEEP_VERSIONS: Final = 4

LEGAL_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `--max-lora-rank`; an adapter of any rank up to it can be loaded."""

PROOF_VERSION: Final = -1
"""What shared weights count as while a trainer proves that the server sees its writes: they are no policy's."""

VERSION_HEADER: Final = "x-policy-version"
"""Response header of vLLM's own /v1 completion routes: the version that answered."""

VERSION_END_HEADER: Final = "x-policy-version-end"
"""Beside it if shared weights changed while the request ran (not for streams, whose headers go first): the version at
its end. What was answered is a mixture."""

GENERATE_ROUTE: Final = "/generate"
HEALTH_ROUTE: Final = "/health"
HEALTH_GENERATE_ROUTE: Final = "/health_generate"
LORA_LOAD_ROUTE: Final = "/lora/load"
LORA_UNLOAD_ROUTE: Final = "/lora/unload"
LORA_STATUS_ROUTE: Final = "/lora/status"
LORA_CHANNEL_ROUTE: Final = "/lora/channel"
LORA_CHANNEL_CLOSE_ROUTE: Final = "/lora/channel/close"
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


def version_name(lora_name: str, version: int) -> str:
    """The adapter's name in the server for one policy version: `version_name("policy", 3) == "policy-v3"`."""
    return f"{lora_name}-v{version}"


def parse_version(name: str, lora_name: str) -> int | None:
    """The version in a name made by `version_name`, or None if it is no such name of this `lora_name`."""
    number = name.removeprefix(f"{lora_name}-v")
    if number == name or not (number.isascii() and number.isdigit() and len(number) <= 18):
        return None
    version = int(number)
    return version if version_name(lora_name, version) == name else None  # "policy-v03" is no version's name


def servable_rank(rank: int) -> int:
    """The smallest legal `--max-lora-rank` that holds adapters of `rank`.

    Raises:
        ValueError: no legal rank is large enough.
    """
    for legal in LEGAL_LORA_RANKS:
        if 1 <= rank <= legal:
            return legal
    ranks = ", ".join(map(str, LEGAL_LORA_RANKS))
    raise ValueError(f"LoRA rank: got {rank}, wanted 1 to {LEGAL_LORA_RANKS[-1]} (served as {ranks}); choose one")


# POST /generate --------------------------------------------------------------------------------------------


class TokenPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt that is tokenised already; `prompt_token_ids` must not be empty."""

    prompt_token_ids: list[int]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate`. On the wire the body is flat: `sampling`'s keys stand beside `prompt`.

    `sampling` holds vLLM's SamplingParams by their own names (`n`, `max_tokens`, `temperature`, `stop`,
    `seed`, `logprobs`, `prompt_logprobs`, …). `model` or `policy_version` pins a version; without them, or
    with the served model's name, the newest version answers.
    """

    prompt: str | TokenPrompt
    stream: bool = False
    model: str | None = None
    policy_version: int | None = None
    sampling: dict[str, Any] = {}

    def to_body(self) -> dict[str, Any]:
        """The flat JSON object that goes over the wire."""
        prompt = self.prompt if isinstance(self.prompt, str) else msgspec.to_builtins(self.prompt)
        routing = {"stream": self.stream or None, "model": self.model, "policy_version": self.policy_version}
        return self.sampling | {"prompt": prompt} | {key: v for key, v in routing.items() if v is not None}

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> "GenerateRequest":
        """Split a flat body; which sampling keys are known depends on the server's vLLM, so any may come.

        Raises:
            msgspec.ValidationError: a routing key is missing or has the wrong type; the message names it.
        """
        routing = {"prompt", "stream", "model", "policy_version"}
        head = {key: value for key, value in body.items() if key in routing}
        sampling = {key: value for key, value in body.items() if key not in routing}
        return msgspec.convert(head | {"sampling": sampling}, cls)


TokenLogprobs = dict[int, float]
"""Token id (text on the wire) to its logprob, natural log, of the distribution that was sampled from."""


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of `/generate`; lists run over the `n` completions.

    `logprobs[out][pos]` is a list of one object `{"<token id>": logprob}` whose first key is the sampled
    token (asked with `logprobs: 0` it is the only one; with `logprobs: k` the k likeliest follow).
    `prompt_logprobs[pos]` is null at the first position. `token_ids` includes the stop token that ended a
    completion, if one did. `policy_version` is the version that the request began with; if shared weights changed
    while it ran, `policy_version_end` is the one that it ended with, and the completions are a mixture.
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


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a streamed `/generate` (newline-delimited JSON): what completion `index` gained.

    A completion has ended when its `finish_reason` is there. `policy_version_end` is there once shared weights have
    changed since the request began: the version by then.
    """

    index: int
    text: str
    token_ids: list[int]
    policy_version: int
    model: str
    finish_reason: str | None = None
    logprobs: list[list[TokenLogprobs]] | None = None
    policy_version_end: int | None = None


# /lora/... -------------------------------------------------------------------------------------------------


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
    """One version that the engine holds. `draining`: no new request gets it, it leaves with its last one."""

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


# /bridge/... -----------------------------------------------------------------------------------------------


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
    `logits_dtype`: of those that logprobs come from; null if it is not known.
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


# errors ----------------------------------------------------------------------------------------------------


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Which field was wrong, what came, what was wanted, and how to mend it; `message` says all four."""

    message: str
    type: str
    code: int
    param: str | None = None
    got: str | None = None
    wanted: str | None = None
    fix: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every refusal of our routes; the shape is that of OpenAI errors with three fields more."""

    error: ErrorDetail


# preflight -------------------------------------------------------------------------------------------------


class PreflightReport(msgspec.Struct, frozen=True, kw_only=True):
    """The one JSON line of `python -m vllm_server.preflight MODEL`.

    Attributes:
        reason: why it is not served; empty if it is.
        by_tables: vLLM's tables and the config.json alone have answered: as long as they stay, so does the answer.
    """

    model: str
    supported: bool
    reason: str
    by_tables: bool
    architectures: list[str]
    vllm_version: str
    torch_version: str
    device: Literal["cpu", "cuda"]
