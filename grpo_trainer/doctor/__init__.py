"""`grpo doctor`: would this run work on this machine? Looks before anything is started, and says what to mend."""
