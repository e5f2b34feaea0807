"""Where a worker takes the weights of a version from: one file for each way."""
