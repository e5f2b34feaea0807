"""The engine's end of each transport, by the names of the trainer's (`grpo_trainer/weights/transports`)."""
