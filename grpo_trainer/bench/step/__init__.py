"""`grpo bench step`: optimisation steps on synthetic rollouts, timed."""
