"""Settings of torch's allocator of GPU memory: the user's stay, but for the one that this project sets."""

import pytest

from grpo_trainer.engine.allocator import with_segments


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
