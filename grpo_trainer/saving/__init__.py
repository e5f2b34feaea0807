"""Checkpoints: a copy in main memory, a thread that writes it, checksums that detect damage, and resuming."""
