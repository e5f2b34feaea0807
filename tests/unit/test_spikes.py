"""Exploding gradients are recognised by the norms before them."""

from __future__ import annotations

from grpo_trainer.optim.spikes import NEEDED, REMEMBERED, NormHistory


def test_a_norm_far_above_the_median_is_a_spike() -> None:
    history = NormHistory(4.0)
    assert not any(history.is_spike(norm) for norm in [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0])  # median 2
    assert not history.is_spike(7.9)
    assert history.is_spike(8.1)  # 4 * 2 = 8


def test_too_few_norms_judge_nobody() -> None:
    history = NormHistory(2.0)
    assert not any(history.is_spike(norm) for norm in [1.0] * (NEEDED - 1))
    assert not history.is_spike(100.0)


def test_a_level_that_lasts_is_no_spike() -> None:
    history = NormHistory(2.0)
    for _ in range(REMEMBERED):
        history.is_spike(1.0)
    spikes = [history.is_spike(10.0) for _ in range(REMEMBERED)]
    assert spikes[0] and not spikes[-1]


def test_without_a_factor_nothing_is_a_spike() -> None:
    history = NormHistory(0.0)
    assert not any(history.is_spike(norm) for norm in [1.0] * NEEDED + [1e9])


def test_a_checkpoint_has_them_all() -> None:
    history, resumed = NormHistory(2.0), NormHistory(2.0)
    for norm in [1.0] * NEEDED:
        history.is_spike(norm)
    resumed.restore(history.norms)
    assert resumed.is_spike(2.1) and resumed.norms == [1.0] * NEEDED + [2.1]
