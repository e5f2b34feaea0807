"""What `python -m vllm_server.preflight` says."""

from typing import Literal

import msgspec


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
