"""Clients of an environment's peers: the rollout API, the inference server, a teacher's server."""
