"""`grpo bench sync`: the duration of a weight bridge's publishes, their cost to the server, and leaks of memory."""
