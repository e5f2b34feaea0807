"""The GPUs that tests may use: those of CUDA_VISIBLE_DEVICES, or all. As a program: use one."""

from __future__ import annotations

import os


def only_gpus(*indices: int) -> dict[str, str]:
    """Return the environment of a server that sees only these of the tests' GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(max(indices) + 1)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[index] for index in indices)}


if __name__ == "__main__":
    import torch

    assert float(torch.ones(2, device="cuda").sum()) == 2.0
