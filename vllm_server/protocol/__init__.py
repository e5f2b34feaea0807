"""The inference server's HTTP contract with the trainer and the environments.

It imports neither torch nor vLLM, so that both sides can use it; only `gloo`, `file_parts` and
`page_lock`, which are imported by themselves, need torch.
Bodies are JSON; encode and decode them with `msgspec.json`. Structs that come *from* a client forbid unknown fields.
Structs that go *to* a client may get new fields, so readers must ignore unknown fields, as msgspec does.

Versions. The policy is published as numbered versions, each with a name that a server process never uses twice:
`<lora-name>-v<N>`. Version 0 is the base model, until an adapter is published as version 0. A request that names no
adapter gets the version published last, and every answer names its version.
"""

# ruff: noqa: F401  # these names are for importers of this package
from vllm_server.protocol.bridge import (
    FORMAT,
    BridgeDebug,
    BridgeInfo,
    BridgeStatus,
    Checksums,
    EndpointList,
    ParameterInfo,
    PausedState,
    PauseRequest,
    SleepingState,
    StateDictInfo,
    WorkerInfo,
    machine_id,
)
from vllm_server.protocol.generate import (
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    TokenLogprobs,
    TokenPrompt,
)
from vllm_server.protocol.lora import (
    SAFETENSORS_MEDIA_TYPE,
    ChannelCloseRequest,
    ChannelRequest,
    ChannelResponse,
    CudaIpcChannel,
    LoraLoadRequest,
    LoraLoadResponse,
    LoraStatus,
    LoraUnloadRequest,
    LoraUnloadResponse,
    NcclChannel,
    Transport,
    VersionStatus,
)
from vllm_server.protocol.routes import (
    BRIDGE_CHECKSUMS_ROUTE,
    BRIDGE_DEBUG_ROUTE,
    BRIDGE_INFO_ROUTE,
    BRIDGE_IS_PAUSED_ROUTE,
    BRIDGE_IS_SLEEPING_ROUTE,
    BRIDGE_LIST_ENDPOINTS_ROUTE,
    BRIDGE_PAUSE_ROUTE,
    BRIDGE_RESUME_ROUTE,
    BRIDGE_SLEEP_ROUTE,
    BRIDGE_STATE_DICT_INFO_ROUTE,
    BRIDGE_UPDATE_BEGIN_ROUTE,
    BRIDGE_UPDATE_END_ROUTE,
    BRIDGE_WAKE_UP_ROUTE,
    BRIDGE_WEIGHTS_APPLY_ROUTE,
    BRIDGE_WEIGHTS_CLOSE_ROUTE,
    BRIDGE_WEIGHTS_OPEN_ROUTE,
    BRIDGE_WEIGHTS_STAGE_ROUTE,
    CPU_CACHE_BYTES,
    DEFAULT_PORT,
    GENERATE_ROUTE,
    HEALTH_GENERATE_ROUTE,
    HEALTH_ROUTE,
    LORA_CHANNEL_CLOSE_ROUTE,
    LORA_CHANNEL_ROUTE,
    LORA_LOAD_ROUTE,
    LORA_STATUS_ROUTE,
    LORA_UNLOAD_ROUTE,
    VERSION_END_HEADER,
    VERSION_HEADER,
    WORKER_QUEUE_BYTES,
)
from vllm_server.protocol.update import (
    InFlight,
    UpdateBeginRequest,
    UpdateBeginResponse,
    UpdateEndRequest,
    UpdateEndResponse,
)
from vllm_server.protocol.versions import (
    DEFAULT_KEEP_VERSIONS,
    DEFAULT_LORA_NAME,
    HIGHEST_VERSION,
    LEGAL_LORA_RANKS,
    LONGEST_NAME,
    PROOF_VERSION,
    SPARE_ADAPTERS,
    VLLM_RUN,
    parse_version,
    servable_rank,
    version_name,
)
from vllm_server.protocol.weights import (
    DiskSource,
    GlooSource,
    Staging,
    WeightsApplyRequest,
    WeightsDone,
    WeightsOpenRequest,
    WeightsOpenResponse,
    WeightsStageRequest,
    WeightTransport,
)
