"""A small model to try GRPO on: `python -m environments.demo_model OUT`."""
