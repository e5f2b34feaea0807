"""Word problems whose answer is a number: GSM8K, and the judge of answers."""
