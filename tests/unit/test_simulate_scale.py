"""The simulation of scale against sums that can be done by hand: what one stage alone allows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripts import load_script

scale = load_script("simulate_scale")
FREE = scale.Costs(
    server_tokens=1000.0, server_groups=4, trainer_tokens=1e9, publish=0.0, publish_each=0.0, api=0.0, environment=0.0
)
"""Only generation costs anything: a group of 8 x 10 tokens takes 8 * 10 * 4 / 1000 = 0.32 s."""
SMALL = scale.Setup(servers=2, trainer_gpus=1, batch_groups=8, completion_tokens=10.0, prompt_tokens=10.0, sigma=0.0)


def test_servers_alone_give_their_own_rate() -> None:
    found = scale.simulate(SMALL, FREE)
    assert found.tokens == pytest.approx(2 * 1000.0)
    assert found.limit == "servers" and found.busy["servers"] == pytest.approx(1.0)
    assert found.step_seconds == pytest.approx(0.32), "8 groups a batch on 2 x 4 places"


def test_lengths_that_differ_cost_the_servers_nothing_when_enough_is_ahead() -> None:
    found = scale.simulate(replace(SMALL, sigma=0.5, batch_groups=256), FREE)
    assert found.tokens == pytest.approx(2000.0, rel=0.05) and found.busy["servers"] > 0.98


def test_a_slow_trainer_limits() -> None:
    # 8 groups x 8 completions x (10 + 10) tokens = 1,280 tokens; at 640 tokens a second 2 s; 0.25 + 0.5 s to publish to
    # two servers. 640 of these tokens are completions: 640 / 2.75 = 232.7 a second.
    found = scale.simulate(SMALL, replace(FREE, trainer_tokens=640.0, publish=0.25, publish_each=0.5))
    assert found.tokens == pytest.approx(640 / 2.75)
    assert found.busy["training"] == pytest.approx(2 / 2.75) and found.busy["publishing"] == pytest.approx(0.75 / 2.75)


def test_a_trainer_with_twice_the_gpus_trains_in_half_the_time() -> None:
    one, two = (
        scale.simulate(replace(SMALL, trainer_gpus=gpus), replace(FREE, trainer_tokens=640.0)) for gpus in (1, 2)
    )
    assert (one.step_seconds, two.step_seconds) == (pytest.approx(2.0), pytest.approx(1.0))
    assert one.limit == "training"


def test_publishing_limits_when_it_grows_with_the_servers() -> None:
    found = scale.simulate(replace(SMALL, servers=11), replace(FREE, publish_each=0.1))
    assert found.limit == "publishing" and found.step_seconds == pytest.approx(1.0, rel=1e-5)


def test_a_server_that_is_half_full_decodes_faster_as_far_as_its_step_grows() -> None:
    # 4 groups in flight on 8 places: a step takes half of the time, or three quarters: 4 x 80 tokens in 0.16 or 0.24 s.
    half = replace(SMALL, batch_groups=4)
    assert scale.simulate(half, FREE).tokens == pytest.approx(1000.0)
    assert scale.simulate(half, replace(FREE, growing=1.0)).tokens == pytest.approx(2000.0)
    assert scale.simulate(half, replace(FREE, growing=0.5)).tokens == pytest.approx(4 * 80 / 0.24)


def test_processes_that_share_a_core_take_turns() -> None:
    found = scale.simulate(replace(SMALL, cores=1.0), FREE)
    assert found.tokens == pytest.approx(1000.0, rel=1e-5), "two servers, each at half of its 1,000 tokens a second"
    assert found.limit == "cores" and found.busy["cores"] == pytest.approx(1.0)
    # A completion token takes a server 1 ms and the trainer 2 ms, with its prompt: 3 ms of the only core.
    costs = replace(FREE, trainer_tokens=1000.0)
    found = scale.simulate(replace(SMALL, servers=1, batch_groups=4, cores=1.0), costs)
    assert found.tokens == pytest.approx(1000 / 3, rel=1e-5)
    both = scale.simulate(replace(SMALL, servers=1, batch_groups=4, cores=2.0), costs)
    assert both.tokens == scale.simulate(replace(SMALL, servers=1, batch_groups=4), costs).tokens, "a core for each"


def test_geometric_lengths() -> None:
    # Half of all completions end with the first token, the others are truncated at the second.
    two = replace(SMALL, completion_tokens=2.0, longest=2)
    assert two.mean_tokens == pytest.approx(1.5)
    # 12 x (1 - (11/12)^48): as `grpo bench loop --shape tiny`
    long = replace(SMALL, completion_tokens=12.0, longest=48, batch_groups=64)
    assert long.mean_tokens == pytest.approx(11.8157, abs=1e-4)
    assert scale.simulate(long, FREE).tokens == pytest.approx(2000.0, rel=0.05)


@pytest.mark.parametrize(("stage", "cost"), [("rollout API", {"api": 0.1}), ("environments", {"environment": 0.1})])
def test_a_slow_stage_before_the_trainer_limits(stage: str, cost: dict[str, float]) -> None:
    found = scale.simulate(SMALL, replace(FREE, **cost))  # 10 groups of 80 tokens a second
    assert found.tokens == pytest.approx(800.0) and found.limit == stage


def test_several_environments_work_at_the_same_time() -> None:
    found = scale.simulate(replace(SMALL, environments=2, batch_groups=32), replace(FREE, environment=0.1))
    assert found.tokens == pytest.approx(1600.0) and found.limit == "environments"


def test_too_small_a_batch_leaves_servers_idle() -> None:
    # A batch of 2 groups is in flight: on 2 of 32 places, 2 groups of 80 tokens in 0.32 s.
    found = scale.simulate(replace(SMALL, servers=8, batch_groups=2), FREE)
    assert found.tokens == pytest.approx(500.0)
    assert found.limit == scale.LIMIT and found.busy["servers"] == pytest.approx(1 / 16)


@settings(max_examples=20)
@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 8), st.floats(0.0, 1.0))
def test_no_stage_works_more_than_all_the_time(servers: int, batch: int, environments: int, sigma: float) -> None:
    costs = replace(FREE, trainer_tokens=5000.0, publish=0.01, publish_each=0.01, api=0.002, environment=0.01)
    setup = replace(SMALL, servers=servers, batch_groups=batch, environments=environments, sigma=sigma)
    found = scale.simulate(setup, costs)
    assert all(0 <= share <= 1 + 1e-9 for share in found.busy.values())
    assert found.tokens <= setup.trainer_gpus * costs.trainer_tokens / 2 * (1 + 1e-9), "half of the tokens are prompts"


def test_a_seed_gives_one_outcome() -> None:
    setup = replace(SMALL, sigma=0.5)
    assert scale.simulate(setup, FREE) == scale.simulate(setup, FREE)
    assert scale.simulate(setup, FREE) != scale.simulate(replace(setup, seed=1), FREE)


def test_a_run_that_grows_as_a_whole_keeps_its_proportions() -> None:
    one, many = scale.grown(1), scale.grown(64)
    assert (one.trainer_gpus, one.environments, one.batch_groups) == (2, 1, 64)
    assert (many.trainer_gpus, many.environments, many.batch_groups) == (144, 8, 64 * 64)


def test_the_command_prints_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main(["--servers", "2", "--trainer-gpus", "1", "--batch-groups", "16"])
    printed = capsys.readouterr().out
    expected = scale.simulate(replace(scale.grown(2), trainer_gpus=1, batch_groups=16))
    assert f"{expected.tokens:,.0f} tokens/s" in printed and expected.limit in printed
