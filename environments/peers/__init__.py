"""Clients of what an environment talks to: the rollout API, the inference server, a teacher's server."""
