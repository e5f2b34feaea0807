"""The routes that this server adds to vLLM's own."""
