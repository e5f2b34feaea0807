"""What every weight bridge asks of an inference server before training."""

from __future__ import annotations

import logging

from vllm_server.protocol import BridgeInfo

log = logging.getLogger(__name__)


def problems_of(info: BridgeInfo, seq_len: int, *, by: str = "start it with") -> list[str]:
    """What must be mended first, each as what the server does; what may be meant is a warning.

    Args:
        seq_len: longest sequence of the training.
        by: how its user gives it an argument.
    """
    if info.max_model_len < seq_len:
        log.warning("the server serves at most %d tokens, --seq-len is %d", info.max_model_len, seq_len)
    if info.logprobs_mode == "processed_logprobs":
        return []
    return [
        f"returns {info.logprobs_mode}, not the logprobs that it samples from: {by} --logprobs-mode processed_logprobs"
    ]
