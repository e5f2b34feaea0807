"""Run environments of the `verifiers` library with our rollout API."""
