"""Stop ids that are searched as a set."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from vllm_server.worker.stops import StopIds

TOKENS = st.integers(min_value=0, max_value=50)


@given(st.lists(TOKENS, max_size=30), TOKENS)
def test_they_are_a_list_for_vllm_and_its_workers(ids: list[int], token: int) -> None:
    """vLLM asserts that the ids are a list, also where they come out of a pickle in a worker."""
    stops = StopIds(ids)
    assert isinstance(stops, list) and stops == ids
    assert (token in stops) is (token in ids)
    sent = pickle.loads(pickle.dumps(stops))
    assert type(sent) is list and sent == ids


def test_they_are_searched_by_hash() -> None:
    class Counted(int):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    stops = StopIds(Counted(number) for number in range(1000))
    assert 999 in stops and -1 not in stops and Counted.compared < 10
