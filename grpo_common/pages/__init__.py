"""Pages for a browser: one document in one file, and the parts that all of them share."""
