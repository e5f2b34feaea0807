"""The order of an environment's items, and a run's position in it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Shuffled(Generic[Item]):
    """An endless sequence of items: each comes once before any comes again, in a new order each time.

    The order depends only on the seed, so `position` is all that must be saved.
    """

    def __init__(self, items: Sequence[Item], seed: int) -> None:
        """`items`: at least one.

        Raises:
            ValueError: There are none.
        """
        if not items:
            raise ValueError("items: got none, wanted at least one")
        self.position = 0
        self._items = items
        self._seed = seed
        self._epoch, self._order = -1, list[int]()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        epoch, place = divmod(self.position, len(self._items))
        if epoch != self._epoch:
            order = random.Random(f"{self._seed}/{epoch}")
            self._epoch, self._order = epoch, order.sample(range(len(self._items)), len(self._items))
        self.position += 1
        return self._items[self._order[place]]
