"""Weight bridges: how the inference server comes to generate with the trainer's newest weights."""
