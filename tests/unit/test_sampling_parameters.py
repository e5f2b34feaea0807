"""The GPU has each request's sampling parameters, and is not given them again while no request comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_server.worker.speed import copy_when_changed

NAMES = ("temperature", "top_p", "top_k", "min_p", "seeds")


@pytest.fixture(scope="module")
def vllms() -> Iterator[Callable[..., object]]:
    """vLLM's own `add_request`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_utils, "is_uva_available", lambda: False)  # in main memory
        for name in ("add_request", "apply_staged_writes"):
            patch.setattr(SamplingStates, name, getattr(SamplingStates, name))  # vLLM's own, after the module
        vllms = SamplingStates.add_request
        copy_when_changed()
        yield vllms


@given(steps=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=12))
def test_the_gpu_has_every_parameter_after_each_step(vllms: Callable[..., object], steps: list[list[int]]) -> None:
    """`steps`: the rows that new requests take before each step."""
    states = SamplingStates(8, 100)
    for number, rows in enumerate(steps):
        before = [getattr(states, name).gpu for name in NAMES]
        for row in rows:
            params = SamplingParams(
                temperature=0.1 + number % 16 / 10, top_p=0.9, top_k=7, min_p=0.1, seed=10 * number + row
            )
            states.add_request(row, params)
        states.apply_staged_writes()
        for name, old in zip(NAMES, before, strict=True):
            kept = getattr(states, name)
            assert kept.gpu.tolist() == kept.np.tolist()
            assert number == 0 or (kept.gpu.data_ptr() == old.data_ptr()) is not bool(rows)


@pytest.mark.parametrize("given", [{}, {"temperature": 0.7}, {"top_p": 0.9}])
def test_vllm_learns_whether_a_request_changes_logits(vllms: Callable[..., object], given: dict[str, float]) -> None:
    params = SamplingParams(**given)  # type: ignore[arg-type]
    assert SamplingStates(8, 100).add_request(3, params) == vllms(SamplingStates(8, 100), 3, params)
