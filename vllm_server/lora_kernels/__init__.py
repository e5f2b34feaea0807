"""What makes a server of adapters fast on a GPU.

`kernels` and `operators` add adapters to layers, `groups` sorts a step's tokens by adapter, `install` puts them into a
worker. Here: block sizes for vLLM's own kernels, by GPU; found by `python -m vllm_server.tune_lora`, read by vLLM.
It ships none, and its defaults cost up to a quarter of the tokens per second that adapters are served at: with 256
requests on a 7B shape, one H200 makes 73 % of the base model's tokens with the defaults and 84 % with these.
"""

import os
from pathlib import Path

FOLDER = Path(__file__).parent
VARIABLE = "VLLM_TUNED_CONFIG_FOLDER"
KERNELS_VARIABLE = "GRPO_LORA_KERNELS"
"""How `--lora-kernels` reaches the workers: their processes inherit it."""


def file_name(gpu: str, kernel: str) -> str:
    """As vLLM looks for it: `NVIDIA_H200_SHRINK.json`, `NVIDIA_H200_EXPAND_TRUE.json`."""
    return f"{gpu.replace(' ', '_').replace('-', '_')}_{kernel}.json"


def use_tuned_kernels(gpu: str) -> bool:
    """Point vLLM to this folder if it has tables for the GPU; not if the user has pointed it elsewhere."""
    known = (FOLDER / file_name(gpu, "SHRINK")).is_file()
    if known:
        os.environ.setdefault(VARIABLE, str(FOLDER))
    return known
