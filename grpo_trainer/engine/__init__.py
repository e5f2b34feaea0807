"""One pass over a batch: attention, head, compilation, and the memory that they need."""
