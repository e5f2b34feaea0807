"""The report's own scripts and forms."""
