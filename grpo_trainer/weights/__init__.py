"""Weight bridges: they make the inference server generate with the trainer's newest weights."""
