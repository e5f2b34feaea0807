"""All that can be configured: options as data, their sections, and what goes together. Imports no torch."""
