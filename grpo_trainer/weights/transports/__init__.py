"""How an adapter's tensors come to the server; each has its other end in `vllm_server/worker`, by the same name."""
