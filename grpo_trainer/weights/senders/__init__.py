"""The ways all weights reach a server: one file for each `--broadcast-transport`."""
