"""The states of all random generators of a run: Python's, numpy's, torch's, and the GPU's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the present states, as tensors and plain values that `torch.load(weights_only=True)` accepts."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, np.int64)), *rest),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Restore the states; the GPU's only if the checkpoint was made on one."""
    torch.set_rng_state(states["cpu"].clone())
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


def seed_generators(seed: int) -> None:
    """Seed all generators with `--seed`."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)  # the GPUs' too
