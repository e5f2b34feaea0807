"""Fast LoRA serving on a GPU.

`kernels` and `operators` add adapters to layers. `install` puts them into a worker, and sorts a step's tokens by
adapter. With 256 requests on a 7B shape, one H200 generates 23,000 tokens a second with these kernels, and 19,300
with vLLM's own.
"""

KERNELS_VARIABLE = "GRPO_LORA_KERNELS"
"""Carries `--lora-kernels` to the worker processes, which inherit the environment."""
