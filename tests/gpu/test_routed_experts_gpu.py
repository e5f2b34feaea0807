"""Routing replay on a GPU, with CUDA graphs: the tests of the CPU lane, on the models and the server of this lane."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from environments.peers.inference import Completion
from tests.integration.test_routed_experts import at_the_trainer, gaps, served
from vllm_server.protocol.routed_experts import unpack

__all__ = ["served"]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_replay_closes_most_of_the_gap(served: tuple[nn.Module, str, list[Completion]]) -> None:
    """The kernels of both sides differ more than on a CPU: with replay the gap is smaller, and few experts change."""
    model, dtype, completions = served
    model = model.to("cuda")
    group = at_the_trainer(completions)
    shape, _ = unpack(completions[0].routed_experts or b"")
    without, _ = gaps(model, dtype, group, "off")
    replayed, changed = gaps(model, dtype, group, "server")
    print(f"{dtype}: {float(without.abs().mean()):.2e} without, {float(replayed.abs().mean()):.2e} with, {changed:.2%}")
    assert changed < 0.5 * (1 - shape.top_k / shape.experts)
    assert float(replayed.abs().mean()) <= float(without.abs().mean()) / (1 if dtype == "float32" else 2)
    assert torch.isfinite(replayed).all()
