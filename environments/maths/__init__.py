"""Word problems with a number for an answer: GSM8K, and who judges answers."""
