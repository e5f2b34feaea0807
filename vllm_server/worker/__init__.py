"""Code that runs inside vLLM's engine processes, not in the server's own."""

import os

LOGITS_VARIABLE = "GRPO_LOGITS_DTYPE"
"""Carries `--logits-dtype` to the worker processes, which inherit the environment."""


def logits_are_exact() -> bool:
    """Return whether workers give logits in fp32. vLLM's batch-invariant product gives only the model's dtype."""
    return os.environ.get(LOGITS_VARIABLE) == "float32" and not is_batch_invariant()


def is_batch_invariant() -> bool:
    """Return whether vLLM computes each request independently of the rest of the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
