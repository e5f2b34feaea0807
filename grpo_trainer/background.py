"""Work in threads that do not keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(do: Callable[[], T]) -> Future[T]:
    """Call a function in a thread, and return the future of its result. Nobody has to wait for it."""
    future = Future[T]()

    def settle() -> None:
        try:
            future.set_result(do())
        except BaseException as error:  # it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=settle, daemon=True).start()
    return future
