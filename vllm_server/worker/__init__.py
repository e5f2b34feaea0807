"""What runs inside vLLM's engine processes, not in the server's own."""
