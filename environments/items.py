"""The order of an environment's items, and a run's position in it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Shuffled(Generic[Item]):
    """An endless sequence of items: each comes once before any comes again, in a new order each time.

    The order depends only on the seed, so `position` is all that must be saved.
    """

    def __init__(self, items: Sequence[Item], seed: int) -> None:
        """Raise a ValueError if there are no items."""
        if not items:
            raise ValueError("items: got none, wanted at least one")
        self.position = 0
        self._items = items
        self._seed = seed
        self._epoch, self._order = -1, list[int]()

    def __len__(self) -> int:
        """The number of different items."""
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        epoch, place = divmod(self.position, len(self._items))
        if epoch != self._epoch:
            order = random.Random(f"{self._seed}/{epoch}")
            self._epoch, self._order = epoch, order.sample(range(len(self._items)), len(self._items))
        self.position += 1
        return self._items[self._order[place]]


class Stream(Generic[Item]):
    """The items of an iterable in its own order, such as a generator's, and the position in them.

    A resumed run draws those that it has had again, and drops them: they must be the same ones each time.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._position = 0

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item = next(self._items)
        self._position += 1
        return item

    @property
    def position(self) -> int:
        """The number of items so far; it can only be raised."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        for _ in islice(self, position - self._position):
            pass
