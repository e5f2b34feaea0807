"""`grpo report`: a run, or several, on one page that asks nobody else for anything."""
