"""Environments of the `verifiers` library, run against our rollout API."""
