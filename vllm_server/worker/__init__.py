"""Code that runs inside vLLM's engine processes, not in the server's own."""

import os

LOGITS_VARIABLE = "GRPO_LOGITS_DTYPE"
"""Carries `--logits-dtype` to the worker processes, which inherit the environment."""

EXPERTS_VARIABLE = "GRPO_ROUTED_EXPERTS"
"""Carries `--return-routed-experts` in the same way."""

EXPERTS_MARK = -2
"""Before routed experts among the columns of token ids; sampling masks have ids and -1 only."""


def logits_are_exact() -> bool:
    """Return whether workers give logits in fp32. vLLM's batch-invariant product gives only the model's dtype."""
    return os.environ.get(LOGITS_VARIABLE) == "float32" and not is_batch_invariant()


def is_batch_invariant() -> bool:
    """Return whether vLLM computes each request independently of the rest of the batch."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
