"""Ways to send an adapter's tensors to the server. `vllm_server/worker` has the other end, under the same name."""
