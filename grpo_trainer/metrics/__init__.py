"""Metrics of steps: types that merge, files of rows, the health of a run."""
