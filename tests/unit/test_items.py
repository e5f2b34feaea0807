"""A resumed run continues with the items that it has not had."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest

from environments.base import BaseEnv
from environments.config import BaseEnvConfig
from environments.items import Shuffled, Stream


class Numbers(BaseEnv[int]):
    name = "numbers"

    def __init__(self, items: Iterator[int]) -> None:
        super().__init__(BaseEnvConfig(tokenizer_name="model"), None, None)  # type: ignore[arg-type]
        self.items = items

    async def evaluate(self) -> dict[str, float]:
        return {}


@pytest.mark.parametrize("make", [lambda: Shuffled(range(10), seed=3), lambda: Stream(count(10))])
def test_a_resumed_environment_goes_on_where_it_was(make: Any) -> None:
    whole, first, resumed = [*islice(make(), 25)], Numbers(make()), Numbers(make())
    assert [*islice(first.items, 13)] == whole[:13]
    resumed.restore(first.state())
    assert [*islice(resumed.items, 12)] == whole[13:] and resumed.state() == {"position": 25}


def test_a_stream_ends_with_its_items() -> None:
    stream = Stream([1, 2])
    stream.position = 5
    assert [*stream] == [] and stream.position == 2
