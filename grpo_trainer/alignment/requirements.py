"""Requirements that every weight bridge checks on an inference server before training."""

from __future__ import annotations

import logging

import torch
from torch import nn

from grpo_common.errors import Problem
from grpo_trainer.engine.forward import evaluating
from vllm_server.protocol import BridgeInfo

log = logging.getLogger(__name__)


def problems_of(
    info: BridgeInfo, seq_len: int, *, by: str = "start it with", model: nn.Module | None = None
) -> list[Problem]:
    """Return the problems that prevent training, and log a warning for settings that may be intended.

    Args:
        seq_len: longest sequence of the training.
        by: first words of a fix: how the user passes the server an argument.
        model: the trainer's model, if the user started the server separately; else None.
    """
    if info.max_model_len < seq_len:
        log.warning("the server serves at most %d tokens, --seq-len is %d", info.max_model_len, seq_len)
    if model is not None and info.logits_dtype is not None:
        _compare_logits(info, _logits_dtype(model))
    if info.logprobs_mode == "processed_logprobs":
        return []
    wanted = "processed_logprobs"
    return [
        Problem(
            field="--logprobs-mode",
            got=info.logprobs_mode,
            wanted=wanted,
            fix=f"{by} --logprobs-mode {wanted}",
            summary="the inference server does not return the logprobs that it samples from",
        )
    ]


def _compare_logits(info: BridgeInfo, own: str) -> None:
    """Warn if only one side rounds its logits to 16 bits: their logprobs then differ more than if both sides did.

    A server in fp32 has fp32 logits in any case.
    """
    if (info.logits_dtype == "float32") != (own == "float32") and info.dtype != "float32":
        log.warning(
            "the server's logits are %s, the trainer's %s: their logprobs differ by more than they need; start the "
            "server with --logits-dtype %s, or give the trainer the other",
            *(info.logits_dtype, own, "float32" if own == "float32" else "model"),
        )


def _logits_dtype(model: nn.Module) -> str:
    """Return the dtype of the trainer's logits."""
    device = next(model.parameters()).device
    with torch.no_grad(), evaluating(model):
        logits_BTV = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False).logits
    return str(logits_BTV.dtype).removeprefix("torch.")
