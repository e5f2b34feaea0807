"""Names and shapes of vLLM's parameters as it reports them, and where each of transformers' was found in them.

`python -m tests.golden.host FOLDER` writes the files anew, and tries the attached models besides.
"""
