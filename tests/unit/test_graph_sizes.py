"""The batch sizes that get a CUDA graph."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_server import arguments, compat


def planned(monkeypatch: pytest.MonkeyPatch, default: int = 1024, **given: Any) -> list[int] | None:
    """The sizes on a GPU where vLLM computes `default` sequences at one time."""
    monkeypatch.setattr(compat, "default_max_num_seqs", lambda world_size: default)
    unset = {
        "cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None, "max_num_seqs": None,
        "compilation_config": SimpleNamespace(cudagraph_capture_sizes=None), "speculative_config": None,
        "enforce_eager": False, "pipeline_parallel_size": 1, "tensor_parallel_size": 1,
        "performance_mode": "balanced",
    }  # fmt: skip
    args = Namespace(**unset | given)
    arguments._plan_graphs(args)
    return args.cudagraph_capture_sizes


@pytest.mark.parametrize(
    ("sequences", "last"),
    [
        (1, [1, 2]),
        (3, [3, 4, 6]),
        (100, [160, 192, 200]),
        (256, [384, 448, 512]),
        (600, [512, 600, 640, 768, 1024]),
        (4096, [640, 768, 1024]),
    ],
)
def test_graphs_reach_twice_the_sequences_that_are_computed_at_one_time(
    monkeypatch: pytest.MonkeyPatch, sequences: int, last: list[int]
) -> None:
    sizes = planned(monkeypatch, default=sequences)
    assert sizes is not None
    assert sizes[-len(last) :] == last
    assert min(sequences, 1024) in sizes  # a batch of one token of each is not padded
    assert planned(monkeypatch, default=7, max_num_seqs=sequences) == sizes


@pytest.mark.parametrize(
    "given",
    [
        {"enforce_eager": True},
        {"speculative_config": {"num_speculative_tokens": 3}},
        {"performance_mode": "interactivity"},
        {"max_cudagraph_capture_size": 64},
        {"compilation_config": SimpleNamespace(cudagraph_capture_sizes=[1, 8])},
        {"compilation_config": SimpleNamespace(max_cudagraph_capture_size=8)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_vllm_chooses_where_it_knows_better(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    assert planned(monkeypatch, **given) is None


def test_sizes_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, cudagraph_capture_sizes=[1, 5]) == [1, 5]


def test_vllm_says_how_many_sequences_it_computes_at_one_time() -> None:
    pytest.importorskip("vllm")
    assert compat.default_max_num_seqs(1) >= 16
