"""What is kept from one run to the next, in `$GRPO_CACHE` or `~/.cache/grpo`. What is removed is made again.

served/      vLLM's answers to whether it serves a model
starts/      how long the last start took, by phase
inductor/    what torch.compile has compiled
triton/      kernels that Triton has compiled
vllm/        vLLM's own cache: graphs that it has compiled, facts about model classes
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

CACHE_VARIABLE = "GRPO_CACHE"
"""A folder instead of `~/.cache/grpo`."""

COMPILE_CACHES = MappingProxyType(
    {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
)
"""The variable by which a library is told its cache, and our folder for it."""


def cache_folder() -> Path | None:
    """Return the folder, which may not be there yet; None: there is no home folder either."""
    try:
        return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "grpo").absolute()
    except RuntimeError:
        return None


def compile_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which compilers keep what they compile in our folder.

    Variables that the environment has are the user's own choice and left out.
    """
    folder = cache_folder()
    if folder is None:
        return {}
    return {name: str(folder / place) for name, place in COMPILE_CACHES.items() if not environment.get(name)}
