"""The GPUs that tests may use, those of CUDA_VISIBLE_DEVICES or all, and how exactly they compute."""

from __future__ import annotations

import os
from typing import Final

TOLERANCE: Final = 0.04
"""Nats a token, as the mean over few tokens, by which the logprobs of a server and a trainer may differ that have the
same weights in bfloat16. Of the demo model they differ by 0.017 over many tokens, by more where few are compared."""


def only_gpus(*indices: int) -> dict[str, str]:
    """Return the environment of a server that sees only these of the tests' GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(max(indices) + 1)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[index] for index in indices)}
