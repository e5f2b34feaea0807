"""Settings of torch's allocator of GPU memory: the user's stay, but for the one that this project sets."""

import threading

import pytest
import torch

from grpo_trainer.engine import allocator
from grpo_trainer.engine.allocator import shareable, with_segments


@pytest.mark.parametrize(
    ("asked", "expandable", "wanted"),
    [
        ("", True, "expandable_segments:True"),
        ("", False, "expandable_segments:False"),
        ("max_split_size_mb:64", True, "max_split_size_mb:64,expandable_segments:True"),
        ("expandable_segments:True,max_split_size_mb:64", False, "max_split_size_mb:64,expandable_segments:False"),
        ("max_split_size_mb:64, expandable_segments:True", False, "max_split_size_mb:64,expandable_segments:False"),
    ],
)
def test_other_settings_stay(asked: str, expandable: bool, wanted: str) -> None:
    assert with_segments(asked, expandable=expandable) == wanted


def test_a_thread_does_not_change_the_settings_under_which_another_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)
    monkeypatch.setattr(allocator, "_set", lambda *, expandable: said.append(expandable))

    def allocate() -> None:
        with shareable():
            pass

    other = threading.Thread(target=allocate)
    with shareable():
        other.start()
        other.join(0.2)
        assert said == [False]
    other.join()
    assert said == [False, True, False, True]
