"""`grpo bench loop`: a whole run on a synthetic environment, measured from outside."""
