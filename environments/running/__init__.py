"""Run an environment as a program: command line, `serve` and its backpressure, files, metrics, state."""
