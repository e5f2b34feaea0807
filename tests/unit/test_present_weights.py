"""Weights that are gathered once for all servers of a version."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grpo_trainer.weights.broadcast import BroadcastBridge, PresentWeights

NOTHING: Any = SimpleNamespace(in_flight="keep", close=lambda: None)


def test_they_are_gathered_anew_once_they_change() -> None:
    """Even for the same version: a server may have been sent the old ones as a version that does not count."""
    weights = PresentWeights(lambda: {"w": torch.zeros(1)}, keep=True)
    first = weights.of(1)
    assert weights.of(1) is first
    bridge = BroadcastBridge(NOTHING, NOTHING, weights, NOTHING, "http://server", Path("/x"), 8, "float32")
    with bridge.updating():
        pass
    second = weights.of(1)
    assert second is not first
    bridge.close()
    assert weights.of(1) is not second
