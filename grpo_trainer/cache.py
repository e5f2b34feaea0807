"""The cache for later runs, in `$GRPO_CACHE` or `~/.cache/grpo`. It is safe to delete: runs rebuild it.

inductor/    graphs compiled by torch.compile
triton/      kernels compiled by Triton
vllm/        vLLM's own cache: compiled graphs, facts about model classes
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

CACHE_VARIABLE = "GRPO_CACHE"
"""Environment variable with a folder to use instead of `~/.cache/grpo`."""

COMPILE_CACHES = MappingProxyType(
    {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
)
"""Environment variable of a library's cache -> our folder for it."""


def compile_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that put the compilers' caches into our folder.

    Variables that the user has set already are left out; all, if there is no home folder, or it may not be written.
    """
    try:
        folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "grpo").absolute()
    except RuntimeError:
        return {}
    there = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    if not os.access(there, os.W_OK):
        return {}
    return {name: str(folder / place) for name, place in COMPILE_CACHES.items() if not environment.get(name)}
