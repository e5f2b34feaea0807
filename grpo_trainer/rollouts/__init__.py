"""Scored groups on their way from the rollout API to the trainer."""
