"""The engine's side of each transport, by the trainer's names (`grpo_trainer/weights/transports`)."""
