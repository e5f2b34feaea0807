"""How a checkpoint gets onto the disk and back: a copy in main memory, a thread that writes, checksums that tell."""
