"""What makes a program of an environment: its command line, `serve` and its backpressure, files, figures, state."""
