"""Processes as data: `plan` lists the processes of a run, and `supervisor` starts and ends them."""
