"""The model in the memory of the vLLM server: the bridge file, names, and parameters that are views of its weights."""
