"""What a step measured, and where it goes."""
