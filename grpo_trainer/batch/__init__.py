"""From scored groups to what a forward pass takes: advantages, microbatches, prompts computed once. Pure."""
