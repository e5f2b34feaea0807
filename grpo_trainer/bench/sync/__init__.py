"""`grpo bench sync`: how long a weight bridge takes, what it costs the server meanwhile, and whether it leaks."""
