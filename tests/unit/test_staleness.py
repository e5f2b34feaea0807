"""Old groups: dropped or counted less, by the version that trains on them; and leases that must not run out."""

from __future__ import annotations

import pytest
from grpo_trainer.rollouts.staleness import judge, same_judgement

from grpo_trainer.batch.batching import ready
from grpo_trainer.config.train import ModelConfig, TrainConfig
from grpo_trainer.metrics.types import reduce
from grpo_trainer.rollouts.groups import Group, RolloutBatch
from grpo_trainer.rollouts.leases import Leases
from grpo_trainer.saving.manifest import Progress
from tests.unit.factories import sample
from vllm_server.protocol import PROOF_VERSION


def group(*versions: int | None) -> Group:
    return Group(tuple(sample([1], [2 + i], float(i), version=version) for i, version in enumerate(versions)))


GROUPS = [group(5, 5), group(3, 4), group(None, None), group(1, 5)]


def test_a_group_is_as_old_as_its_oldest_sample_and_of_unknown_age_never_too_old() -> None:
    judged = judge(GROUPS, 5, limit=2)
    assert judged.groups == (GROUPS[0], GROUPS[1], GROUPS[2])
    numbers = reduce(judged.metrics)
    assert numbers["rollout/dropped_stale_groups"] == 1
    assert numbers["rollout/staleness_max"] == 2  # 5 - 3
    assert numbers["rollout/staleness_mean"] == pytest.approx(0.75)  # (0 + 0 + 2 + 1) / 4


def test_without_a_limit_all_are_kept() -> None:
    assert judge(GROUPS, 50, limit=None).groups == tuple(GROUPS)


@pytest.mark.parametrize("limit", [None, 9])
def test_what_a_proofs_weights_have_sampled_is_not_trained_on(limit: int | None) -> None:
    judged = judge([GROUPS[0], group(PROOF_VERSION, 5)], 5, limit, on_stale="downweight")
    assert judged.groups == (GROUPS[0],)
    assert reduce(judged.metrics)["rollout/dropped_stale_groups"] == 1


def test_downweighted_groups_count_one_over_one_plus_excess() -> None:
    judged = judge(GROUPS, 6, limit=2, on_stale="downweight")
    weights = [{one.weight for one in each.samples} for each in judged.groups]
    assert weights == [{1.0}, {0.5}, {1.0}, {0.25}]  # 6 - 3 is 1 above 2: 1 / 2; 6 - 1 is 3 above: 1 / 4
    numbers = reduce(judged.metrics)
    assert numbers["rollout/downweighted_groups"] == 2 and numbers["rollout/dropped_stale_groups"] == 0


def test_batches_that_come_again_are_as_old_as_they_would_have_been() -> None:
    """Saved as version 90, the server saw 100: resumed as 101. Batches of the steps 91 to 100 come again, each with
    samples of the version before it, or of four versions before."""
    resumed = Progress(90, 90).going_on_as(101)
    for step in range(10):
        batch = [group(90 + step), group(86 + step)]
        undisturbed = judge(batch, 90 + step, limit=4)
        again = judge(batch, 101 + step, 4, numbering=resumed.numbering)
        assert again.groups == undisturbed.groups == tuple(batch)
        assert reduce(again.metrics) == reduce(undisturbed.metrics)
    # what is sampled from then on: of version 102 at 107 it is 5 updates old; of version 89 at 105, 94 - 89 = 5
    assert not judge([group(102), group(89)], 107, 4, numbering=resumed.numbering).groups
    assert not judge([group(89)], 105, 4, numbering=resumed.numbering).groups
    # a former process has published 100; the resumed one has not come to it again
    assert reduce(judge([group(100)], 101, 4, numbering=resumed.numbering).metrics)["rollout/staleness_max"] == 0


def test_jumps_add_up_and_a_new_run_has_none() -> None:
    # 90 as 101 (11 skipped), trained to 110 (99 updates), gone on with as 120 (21 skipped)
    numbering = Progress(99, 110, (), Progress(90, 90).going_on_as(101).numbering).going_on_as(120).numbering
    assert [numbering.updates(version) for version in (90, 100, 101, 110, 119, 120, 125)] == [
        *(90, 100, 90, 99, 108, 99, 104),
    ]
    # samples of version 49 in the queue are another run's: 51 - 49 = 2 versions old, as ever
    assert Progress().going_on_as(51) == Progress(0, 51)
    assert Progress(7, 7).going_on_as(7) == Progress(7, 7)


def test_a_weight_multiplies_the_loss_and_leaves_the_normaliser() -> None:
    config = TrainConfig(model=ModelConfig(name="m"))
    plain = ready(RolloutBatch("b", tuple(GROUPS)), config)
    lowered = judge(GROUPS, 6, limit=2, on_stale="downweight").groups
    halved = ready(RolloutBatch("b", lowered), config)
    assert halved.counts == plain.counts
    ratios = [b.weight / a.weight for a, b in zip(plain.sequences, halved.sequences, strict=True)]
    assert ratios == [1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0.25, 0.25]
    assert [each.share for each in halved.sequences] == ratios  # in the entropy bonus, too


def test_judgements_differ_if_a_group_goes_or_counts_otherwise() -> None:
    drops = {version: judge(GROUPS, version, limit=2).groups for version in (3, 4, 5, 6)}
    assert same_judgement(drops[4], drops[5])  # both without the last
    assert not same_judgement(drops[3], drops[4]) and not same_judgement(drops[5], drops[6])
    low = [judge(GROUPS, version, limit=2, on_stale="downweight").groups for version in (5, 6)]
    assert not same_judgement(*low)


def test_leases_that_have_less_than_half_their_time_left_run_out() -> None:
    now = 0.0
    leases = Leases(10.0, clock=lambda: now)
    leases.hold("a")
    now = 4.0
    leases.hold("b")
    assert not leases.running_out
    now = 6.0
    assert leases.running_out == ["a"]
    leases.hold("a")
    now = 10.0
    assert leases.running_out == ["b"]
    leases.end("b")
    assert not leases.running_out


def test_trained_leases_are_unsettled_until_they_end() -> None:
    leases = Leases(10.0)
    for name in ("a", "b", "c"):
        leases.hold(name)
    leases.trained("b")
    leases.trained("a")
    assert leases.unsettled == ("b", "a")
    leases.end("b")
    assert leases.unsettled == ("a",)
