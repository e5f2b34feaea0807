"""GRPO trainer: pulls scored rollouts, takes optimisation steps, keeps a vLLM server on the newest weights."""

__version__ = "0.1.0"
