"""Code that runs inside vLLM's engine processes, not in the server's own."""

import os

EXPERTS_VARIABLE = "GRPO_ROUTED_EXPERTS"
"""Carries `--return-routed-experts` to the worker processes, which inherit the environment."""

KERNELS_VARIABLE = "GRPO_LORA_KERNELS"
"""Carries `--lora-kernels` to them in the same way."""

EXPERTS_MARK = -2
"""Stands before routed experts among the columns of token ids, all of which are 0 or more."""


def is_batch_invariant() -> bool:
    """Return whether vLLM computes each request independently of the rest of the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
