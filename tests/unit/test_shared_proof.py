"""The proof by a change of the weights: whatever happens to the server, the trainer's weights are those of before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from grpo_trainer.alignment import shared_proof
from grpo_trainer.alignment.probes import Probe
from grpo_trainer.alignment.shared_proof import SyntheticChange, prove_shared
from grpo_trainer.errors import BridgeError, ServerError
from tests.golden.models import random_model
from tests.unit.factories import bridge_info
from vllm_server.protocol import PROOF_VERSION


class Asked:
    """A comparison with a server that agrees; `ends`: while it is asked for the changed weights."""

    def __init__(self, *, ends: bool) -> None:
        self.ends = ends

    def compare(self, *_: Any) -> tuple[float, float]:
        return 0.0, 0.1

    def allowed(self, *_: Any) -> float:
        return 0.1

    def ask(self, _: Any, version: int) -> list[Probe]:
        if self.ends and version == PROOF_VERSION:
            raise ServerError("no answer")
        return [Probe([5, 6, 7], 2, torch.zeros(1))]


@pytest.mark.parametrize("ends", ["while it is sent them", "while it is asked"])
def test_a_server_that_ends_during_the_proof_leaves_the_trainers_weights(ends: str) -> None:
    """A run with other servers goes on with them."""
    model = random_model("qwen2").float().eval()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    changed: list[bool] = []

    @contextmanager
    def sending(_: int) -> Iterator[None]:
        yield
        changed.append(any(not torch.equal(each, before[name]) for name, each in model.state_dict().items()))
        if ends == "while it is sent them":
            raise ServerError("no answer")

    proof: Any = Asked(ends=ends == "while it is asked")
    with pytest.raises(ServerError):
        prove_shared(model, proof, bridge_info(), 3, sending)
    assert changed == [True, False]
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_a_change_that_shows_too_little_in_certain_answers_is_made_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[float] = []
    monkeypatch.setattr(SyntheticChange, "enlarge", lambda self, prompts, move: moves.append(move))
    gaps = iter([0.0, 0.1, 0.0, 0.9, 0.0])  # the server's own and that of unchanged weights, twice; at last
    monkeypatch.setattr(shared_proof, "gap", lambda *_: next(gaps))
    proof: Any = Asked(ends=False)
    proved = prove_shared(random_model("qwen2").float(), proof, bridge_info(), 3, lambda _: nullcontext())
    # allowed are 0.1, with the change 0.2: texts are moved by five times that, samples must be by twice that, 0.4
    assert moves == pytest.approx([1.0, 4.0]) and proved.synthetic_moved == 0.9


def test_a_change_that_never_shows_is_an_error_with_the_move_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyntheticChange, "enlarge", lambda *_: None)
    gaps = iter([0.0, 0.3] * 3)
    monkeypatch.setattr(shared_proof, "gap", lambda *_: next(gaps))
    proof: Any = Asked(ends=False)
    with pytest.raises(BridgeError) as failed:
        prove_shared(random_model("qwen2").float(), proof, bridge_info(), 3, lambda _: nullcontext())
    assert "impossible" in failed.value.field.split()
    assert "0.3" in failed.value.got.split() and "0.4," in failed.value.wanted.split()
