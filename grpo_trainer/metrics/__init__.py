"""Metrics of steps: types that merge, files of rows, the summary of a run."""
