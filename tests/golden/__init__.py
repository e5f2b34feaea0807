"""Names and shapes of vLLM's parameters as it reports them, and where each of transformers' was found in them.

`python -m tests.golden.host FOLDER` rewrites the files, and tries the attached models.
"""
