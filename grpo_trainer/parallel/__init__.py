"""Several trainer processes as one: their common work, and the weights and optimizer states that each of them holds."""
