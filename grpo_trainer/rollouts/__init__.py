"""Scored groups from the rollout API to the trainer: client, leases, decoding, filter, staleness."""
