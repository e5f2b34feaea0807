"""Weights that are gathered once for all servers of a version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.weights.broadcast import BroadcastBridge, PresentWeights

NOTHING: Any = SimpleNamespace(in_flight="keep", close=lambda: None)


class Shards:
    """Weights that are gathered; counts how often."""

    def __init__(self) -> None:
        self.weights = {"w": torch.tensor([1.0, 1.0 + 2**-10]), "none": torch.zeros(0, 4), "v": torch.full((3, 2), 5.0)}
        self.count = 0
        self.looks = 0

    def own(self) -> Mapping[str, Tensor]:
        self.looks += 1
        return self.weights

    def gather(self, keep: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
        self.count += 1
        return {name: keep(tensor) for name, tensor in self.weights.items()}

    def present(self) -> PresentWeights:
        return PresentWeights(self.own, self.gather)


def test_they_are_gathered_anew_once_they_change() -> None:
    """Even for the same version: a server may have been sent the old ones as a version that does not count."""
    shards = Shards()
    weights = shards.present()
    weights.of(1, torch.float32)
    weights.of(1, torch.float32)
    assert shards.count == 1
    weights.of(2, torch.float32)
    bridge = BroadcastBridge(NOTHING, NOTHING, weights, NOTHING, "http://server", Path("/x"), 8, "float32")
    with bridge.updating():
        shards.weights["w"] *= 2
    assert weights.of(2, torch.float32)["w"][0] == 2.0 and shards.count == 3
    bridge.close()
    weights.of(2, torch.float32)
    assert shards.count == 4


def test_they_are_rounded_to_each_servers_dtype_in_memory_that_is_used_again() -> None:
    shards = Shards()
    weights = shards.present()
    exact, rounded = weights.of(1, torch.float32), weights.of(1, torch.bfloat16)
    assert exact.keys() == rounded.keys() == shards.weights.keys()
    for name, tensor in shards.weights.items():
        assert torch.equal(exact[name], tensor) and torch.equal(rounded[name], tensor.to(torch.bfloat16))
    assert rounded["w"][1] == 1.0 and rounded["none"].shape == (0, 4)
    again = weights.of(2, torch.bfloat16)
    assert again["v"].data_ptr() == rounded["v"].data_ptr() != exact["v"].data_ptr()
    assert weights.of(1, torch.float32) is exact
    assert weights.own() is shards.weights and shards.looks == 1


def test_weights_of_one_process_are_never_copied() -> None:
    own = {"w": torch.zeros(1)}
    assert PresentWeights(lambda: own).of(1, torch.bfloat16) is own


def test_another_process_reads_what_was_gathered_last() -> None:
    shards = Shards()
    weights = shards.present()
    place = weights.gathered(torch.bfloat16)
    assert place is not None and weights.gathered(torch.bfloat16) is place
    read = [sys.executable, "-c", f"print(open({place.memory.path!r}, 'rb').read().hex(), end='')"]
    for version in (1, 2):
        shards.weights["v"] *= version
        weights.of(version, torch.bfloat16)
        found = bytes.fromhex(subprocess.run(read, capture_output=True, text=True, check=True).stdout)
        assert len(found) == len(place.memory)
        for name in ("w", "v"):
            tensor = place.tensors[name]
            start = tensor.data_ptr() - place.memory.address
            there = torch.frombuffer(bytearray(found[start : start + tensor.nbytes]), dtype=torch.bfloat16)
            assert torch.equal(there, shards.weights[name].to(torch.bfloat16).flatten())
    assert PresentWeights(shards.own).gathered(torch.bfloat16) is None
