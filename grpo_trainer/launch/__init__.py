"""Processes as data: `plan` says what runs, `supervisor` runs it and ends it."""
