"""What servers and their checks say, where tests need none of them."""

from __future__ import annotations

from typing import Literal

from vllm_server.protocol import PreflightReport


def served_by_vllm(model: str, device: Literal["cpu", "cuda"]) -> PreflightReport:
    """vLLM's yes to a model."""
    return PreflightReport(
        model=model,
        supported=True,
        reason="",
        by_tables=True,
        architectures=["Qwen2ForCausalLM"],
        vllm_version="0.32.0",
        torch_version="2.13.0",
        device=device,
    )
