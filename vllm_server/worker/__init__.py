"""What runs inside vLLM's engine processes, not in the server's own."""

LOGITS_VARIABLE = "GRPO_LOGITS_DTYPE"
"""How `--logits-dtype` reaches the workers: their processes inherit it."""
