"""Does the server generate with the weights that the trainer has? Proofs at the start, and a check at every step."""
