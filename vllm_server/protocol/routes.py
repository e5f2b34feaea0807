"""Routes and headers of the server, and defaults that its clients know."""

from typing import Final

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
BRIDGE_WEIGHTS_OPEN_ROUTE: Final = "/bridge/weights/open"
BRIDGE_WEIGHTS_STAGE_ROUTE: Final = "/bridge/weights/stage"
BRIDGE_WEIGHTS_APPLY_ROUTE: Final = "/bridge/weights/apply"
BRIDGE_WEIGHTS_CLOSE_ROUTE: Final = "/bridge/weights/close"
BRIDGE_CHECKSUMS_ROUTE: Final = "/bridge/checksums"
