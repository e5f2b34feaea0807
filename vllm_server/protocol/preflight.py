"""The report of `python -m vllm_server.preflight`."""

from typing import Literal

import msgspec


class PreflightReport(msgspec.Struct, frozen=True, kw_only=True):
    """The one JSON line of `python -m vllm_server.preflight MODEL`.

    Attributes:
        reason: why the model is not served; empty if it is.
        by_tables: only vLLM's tables and config.json decided, so the answer is valid as long as both stay the same.
    """

    model: str
    supported: bool
    reason: str
    by_tables: bool
    architectures: list[str]
    vllm_version: str
    torch_version: str
    device: Literal["cpu", "cuda"]
