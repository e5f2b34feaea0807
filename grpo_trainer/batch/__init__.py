"""Scored groups to the inputs of forward passes: advantages, microbatches, shared prompts. Pure."""
