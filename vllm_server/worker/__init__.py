"""What runs inside vLLM's engine processes, not in the server's own."""

import os

LOGITS_VARIABLE = "GRPO_LOGITS_DTYPE"
"""How `--logits-dtype` reaches the workers: their processes inherit it."""


def logits_are_exact() -> bool:
    """Whether workers give logits in fp32: vLLM's product of a fixed order gives nothing but the model's dtype."""
    return os.environ.get(LOGITS_VARIABLE) == "float32" and not is_batch_invariant()


def is_batch_invariant() -> bool:
    """Whether vLLM was told to compute each request the same way whatever else is served."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
