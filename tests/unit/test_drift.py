"""The drift alarm: planted faults are distinguished, healthy runs are quiet, nothing floods."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from grpo_trainer.alignment import drift
from grpo_trainer.alignment.drift import (
    SAY_EVERY,
    UNKNOWN,
    Cause,
    DriftAlarm,
    Recheck,
    SampleGap,
    drift_alarm,
    find_drift,
    gap_metrics,
    recheck_version,
)
from grpo_trainer.batch.batching import ReadyBatch
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.head import token_scores
from grpo_trainer.engine.routing import CHANGED_MAX
from grpo_trainer.errors import BridgeError, DriftError
from grpo_trainer.metrics.types import Max, reduce
from grpo_trainer.optim.steps import NormHistory
from grpo_trainer.rollouts.groups import Sample
from grpo_trainer.trainer import Trainer
from tests.unit.factories import TinyModel, batch, sample
from tests.unit.tiny_lora import VOCAB, fill_b, tiny_lora
from vllm_server.protocol.routed_experts import RoutedShape

LIMIT = 0.1


def gap(version: int | None, mean: float, tokens: int = 10) -> SampleGap:
    return SampleGap(version, tokens, mean * tokens)


def never(version: int) -> Recheck:
    raise AssertionError(f"a healthy step was rechecked at {version}")


NOTHING_FITS = Recheck(own=0.6, base=0.5, raw=0.5)


@pytest.mark.parametrize(
    ("gaps", "recheck", "expected"),
    [
        ([], None, None),
        ([gap(5, 0.09), gap(5, 0.01), gap(4, 0.25), gap(None, 9.0)], None, None),
        ([gap(5, 0.5, 2), gap(5, 0.01, 98)], None, None),  # (0.5 * 2 + 0.01 * 98) / 100 = 0.0198: over tokens
        # What fits much better explains a gap of fresh samples.
        ([gap(5, 0.6)], Recheck(own=0.6, base=0.02, raw=None), (Cause.BASE_MODEL, 5)),
        ([gap(5, 0.6)], Recheck(own=0.6, base=0.5, raw=0.03), (Cause.TEMPERATURE, 5)),
        ([gap(5, 0.6)], Recheck(own=0.6, base=0.5, raw=0.4), (Cause.FRESH, 5)),
        ([gap(5, 0.6)], Recheck(own=0.6, base=None, raw=None), (Cause.FRESH, 5)),
        # A fresh adapter: base and trainer are hardly apart.
        ([gap(5, 0.6)], Recheck(own=0.11, base=0.1, raw=None), (Cause.FRESH, 5)),
        # Between the limit and that of older samples.
        ([gap(5, 0.11), gap(4, 0.29)], Recheck(own=0.11, base=None, raw=None), (Cause.FRESH, 5)),
        ([gap(5, 0.6), gap(4, 0.05)], NOTHING_FITS, (Cause.ONE_VERSION, 5)),
        ([gap(5, 0.01), gap(4, 0.6), gap(3, 0.05)], None, (Cause.ONE_VERSION, 4)),
        # Old samples may be as far off as the policy has moved.
        ([gap(5, 0.01), gap(4, 0.29)], None, None),
        ([gap(5, 0.01), gap(4, 0.31)], None, (Cause.STALE, 4)),
        ([gap(4, 0.2), gap(3, 0.6)], None, (Cause.STALE, 3)),
        ([gap(5, 0.6), SampleGap(4, 3, math.nan)], None, (Cause.NOT_FINITE, 4)),
        ([SampleGap(5, 3, math.inf)], None, (Cause.NOT_FINITE, 5)),
    ],
)
def test_find_drift(gaps: list[SampleGap], recheck: Recheck | None, expected: tuple[Cause, int] | None) -> None:
    drifted = find_drift(gaps, 5, LIMIT, never if recheck is None else lambda version: recheck)
    assert (drifted and (drifted[0], drifted[1][0].version)) == expected


def test_metrics_are_those_of_fresh_and_of_older_samples() -> None:
    # fresh (0.1 * 10 + 0.4 * 20) / 30 = 0.3, older 0.5; what is not finite or has no version is left out
    gaps = [gap(5, 0.1), gap(5, 0.4, 20), gap(3, 0.5), gap(None, 7.0), SampleGap(5, 1, math.nan)]
    known = {"train/logprob_gap": 0.3, "train/logprob_gap_stale": 0.5}
    assert reduce(gap_metrics(gaps, 5)) == pytest.approx(
        known | {"alignment/kl_rollout_fresh": 0.0, "alignment/kl_rollout_stale": 0.0}
    )
    # no fresh ones: no number, not 0
    assert gap_metrics([gap(3, 0.5)], 5).keys() == {"train/logprob_gap_stale", "alignment/kl_rollout_stale"}
    by_cause = gap_metrics([SampleGap(5, 10, 1.0, 0.2), SampleGap(4, 10, 3.0, 0.9)], 5)
    assert by_cause["alignment/kl_rollout_fresh"].value() == pytest.approx(0.02)
    assert by_cause["alignment/kl_rollout_stale"].value() == pytest.approx(0.09)
    assert gap_metrics([gap(3, 0.5)], None) == {}


# ---------------------------------------------------------------- the alarm


def warned(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """The problem of each warning, and what it says of those before it."""
    return [record.args for record in caplog.records if record.levelno == logging.WARNING]


def test_drift_alarm_names_everything_and_comes_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    alarm = DriftAlarm(LIMIT, "warn", "lora_only")
    for step in range(SAY_EVERY + 1):
        alarm.check_samples(step, [gap(5, 0.6), gap(5, 0.4), gap(4, 0.0)], 5, lambda version: Recheck(0.5, 0.01, None))
    (problem, before), (again, later) = warned(caplog)
    assert problem == again and before == "" and str(SAY_EVERY - 1) in str(later).split()
    assert "lora_only" in problem.field and (problem.summary, problem.fix) == Cause.BASE_MODEL.value
    assert re.findall(r"[\d.]+", problem.got) == ["2", "3", "5", "0.5"] and problem.wanted.endswith(" 0.1")
    alarm.check_samples(SAY_EVERY + 1, [gap(4, 0.6)], 5, never)  # another cause, at once
    assert warned(caplog)[2][0].summary == Cause.STALE.meaning


def test_drift_alarm_stops_but_not_for_samples_that_are_merely_old(caplog: pytest.LogCaptureFixture) -> None:
    alarm = DriftAlarm(LIMIT, "stop", "lora_only")
    alarm.check_samples(0, [gap(4, 0.6)], 5, never)
    assert len(warned(caplog)) == 1
    with pytest.raises(DriftError) as stopped:
        alarm.check_samples(1, [gap(5, 0.6)], 5, lambda version: NOTHING_FITS)
    assert isinstance(stopped.value, BridgeError)
    assert re.findall(r"[\d.]+", stopped.value.got) == ["1", "1", "5", "0.6"]
    with pytest.raises(DriftError) as broken:
        alarm.check_samples(1, [SampleGap(5, 1, math.nan)], 5, never)
    assert re.findall(r"[\d.]+", broken.value.got) == ["1", "1", "5"]
    assert broken.value.summary == Cause.NOT_FINITE.meaning


@pytest.mark.parametrize(
    ("options", "fresh"),
    [({"load_in_4bit": True}, Cause.QUANTISATION), ({"kv_cache_dtype": "fp8"}, Cause.COARSE_SERVER)],
)
def test_drift_alarm_of_quantised_sides(options: dict[str, Any], fresh: Cause) -> None:
    alarm = drift_alarm(config_of(on_drift="stop", drift_limit=LIMIT, **options), None, TinyModel())
    for recheck, cause in ((NOTHING_FITS, fresh), (Recheck(0.6, 0.01, None), Cause.BASE_MODEL)):
        with pytest.raises(DriftError) as stopped:
            alarm.check_samples(0, [gap(5, 0.6)], 5, lambda version, recheck=recheck: recheck)
        assert stopped.value.summary == cause.meaning


def config_of(**options: object) -> TrainConfig:
    return build(TrainConfig, {"model_name": "m", "weight_bridge_mode": "lora_only", **options})


@pytest.mark.parametrize(
    ("noise", "options", "limit"),
    [
        (1e-6, {}, 0.01),  # the floor
        (0.01, {}, 0.05),  # 5 times the noise: the server may be coarser
        (0.03, {"drift_limit": 0.7}, 0.7),
        (0.009, {"dtype": "bfloat16", "weight_bridge_mode": "none"}, 0.1),  # fp32 weights that compute in 16 bits
        (0.009, {"dtype": "bfloat16", "weight_bridge_mode": "broadcast"}, 0.1),
        (0.04, {"dtype": "bfloat16", "weight_bridge_mode": "none"}, 0.2),
        (0.005, {"dtype": "float16", "weight_bridge_mode": "none"}, 0.03),
        (0.17, {"load_in_4bit": True}, 0.34),  # twice
        (0.64, {"load_in_4bit": True}, 0.5),  # the ceiling
        (None, {}, 0.15),  # not measured: what the proof would let pass
        (None, {"load_in_4bit": True}, 0.5),
    ],
)
def test_drift_alarm_limit(noise: float | None, options: dict[str, Any], limit: float) -> None:
    assert drift_alarm(config_of(**options), noise, TinyModel()).limit == pytest.approx(limit)
    assert drift_alarm(config_of(), 1e-6, TinyModel().bfloat16()).limit == pytest.approx(0.1), "of weights in 16 bits"


def test_drift_alarm_without_a_limit_checks_replayed_experts_only(caplog: pytest.LogCaptureFixture) -> None:
    alarm = drift_alarm(config_of(drift_limit=0), 0.03, TinyModel())
    alarm.check_samples(0, [gap(5, 0.6), SampleGap(5, 1, math.nan)], 5, never)
    assert warned(caplog) == []
    alarm.check_routing(0, {CHANGED_MAX: Max(0.6)}, RoutedShape(layers=2, top_k=2, experts=8))
    assert len(warned(caplog)) == 1


def test_drift_alarm_of_routing(caplog: pytest.LogCaptureFixture) -> None:
    """Of 8 experts 2 are chosen: by chance 75 % would differ, half of that is the limit."""
    alarm, shape = DriftAlarm(LIMIT, "warn", "lora_only"), RoutedShape(layers=2, top_k=2, experts=8)
    for step in range(6):
        alarm.check_routing(step, {CHANGED_MAX: Max(0.37)}, shape)
    assert warned(caplog) == []
    for step in range(7, 7 + SAY_EVERY + 1):  # 20 is among them, and of no account
        alarm.check_routing(step, {CHANGED_MAX: Max(0.38)}, shape)
    (problem, before), (_, later) = warned(caplog)
    assert before == "" and str(SAY_EVERY - 1) in str(later).split()
    assert (problem.field, problem.summary) == ("routed_experts", Cause.ROUTING.meaning)
    assert "38%" in problem.got.split() and "38%" in problem.wanted.split()  # 37.5 rounds to 38
    with pytest.raises(DriftError):
        DriftAlarm(LIMIT, "stop", "lora_only").check_routing(7, {CHANGED_MAX: Max(0.38)}, shape)


# ---------------------------------------------------------------- in the trainer, faults planted in the samples


def rollouts(sampler: PeftModel, version: int, temperature: float = 1.0, *, raw: bool = False) -> list[Sample]:
    """Two samples with the logprobs that a server would have sent that holds the sampler's weights."""
    random = np.random.default_rng(version)
    made = []
    for reward in (0.0, 1.0):
        tokens = random.integers(0, VOCAB, 12)
        columns = torch.arange(4, 12)
        with torch.no_grad():
            logits = sampler.eval()(input_ids=torch.tensor(tokens)[None]).logits
            said = torch.full((8,), 1.0 if raw else temperature)
            values = token_scores(logits, torch.tensor(tokens)[None], columns * 0, columns, said).logprobs_N
        prompt, completion = tokens[:4].tolist(), tokens[4:].tolist()
        scored = {"logprobs": values.tolist(), "temperature": temperature, "version": version}
        made.append(sample(prompt, completion, reward, **scored))
    return made


def trainer(**options: object) -> Trainer:
    config = config_of(**{"lora_r": 8, "on_drift": "stop", **options})
    model = other(1)
    made = Trainer(model, config)
    made.alarm = drift_alarm(config, 1e-6, model)
    return made


def other(seed: int | None = 2) -> PeftModel:
    """By default it has other weights than the trainer; seed 1 has the same, None the base model's."""
    model = tiny_lora()
    if seed is not None:
        fill_b(model, seed)
    return model


def of_version(version: int, *samples: list[Sample]) -> ReadyBatch:
    return replace(trainer().ready(batch(*samples)), policy_version=version)


def test_step_passes_honest_samples_and_their_gap_is_rounding() -> None:
    result = trainer().step(of_version(3, rollouts(other(1), 3), rollouts(other(), 2)), 0)
    numbers = reduce(result.metrics)
    assert numbers["train/logprob_gap"] < 1e-5 and numbers["train/logprob_gap_stale"] > 0.3
    assert result.updated
    nothing, unknown = (
        [replace(s, **{key: None}) for s in rollouts(other(), 3)] for key in ("rollout_logprobs", "version")
    )
    assert "train/logprob_gap" not in trainer().step(of_version(3, nothing, unknown), 0).metrics, "no evidence"


@pytest.mark.parametrize("fault", ["base", "raw", "weights", "one version", "nan"])
def test_step_stopped_by_planted_faults_leaves_the_weights(fault: str) -> None:
    one, same = trainer(), other(1)
    broken = [replace(s, rollout_logprobs=s.positions * np.float32(np.nan)) for s in rollouts(same, 3)]
    groups, cause = {
        "base": ([rollouts(other(None), 3)], Cause.BASE_MODEL),
        "raw": ([rollouts(same, 3, 0.4, raw=True)], Cause.TEMPERATURE),
        "weights": ([rollouts(other(), 3)], Cause.FRESH),
        "one version": ([rollouts(other(), 3), rollouts(same, 2)], Cause.ONE_VERSION),
        "nan": ([broken], Cause.NOT_FINITE),
    }[fault]
    before = [parameter.detach().clone() for parameter in one.parameters]
    with pytest.raises(DriftError) as stopped:
        one.step(of_version(3, *groups), 0)
    assert stopped.value.summary == cause.meaning
    assert all(torch.equal(a, b) for a, b in zip(before, one.parameters, strict=True))


def test_the_second_look_makes_no_logits_of_all_tokens_and_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer()
    head: Any = one.model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    head.register_forward_hook(lambda *_: pytest.fail("the model's own logits were made"))
    sequences = of_version(3, rollouts(other(), 3)).sequences
    whole = recheck_version(one.forward, sequences, 3)
    monkeypatch.setattr(drift, "RECHECKED_TOKENS", 9)  # of the first sequence 9 tokens, 5 of them trained; no other
    (first,) = drift.beginnings(sequences)
    assert (len(first.tokens_T), first.positions.tolist()) == (9, [4, 5, 6, 7, 8])
    some = recheck_version(one.forward, sequences, 3)
    assert min(whole.own, some.own) > LIMIT and whole.own != some.own
    monkeypatch.setattr(drift, "RECHECKED_TOKENS", 4)  # prompts alone
    assert recheck_version(one.forward, sequences, 3) == UNKNOWN


# spikes of the gradient's norm ---------------------------------------------------------------------------------------


def test_norm_spikes() -> None:
    history = NormHistory(4.0)
    assert not any(history.is_spike(norm) for norm in [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0])  # median 2
    assert not history.is_spike(7.9)
    assert history.is_spike(8.1)  # 4 * 2 = 8

    history = NormHistory(2.0)
    assert not any(history.is_spike(norm) for norm in [1.0] * (NormHistory.NEEDED - 1))
    assert not history.is_spike(100.0)

    history = NormHistory(2.0)
    for _ in range(NormHistory.REMEMBERED):
        history.is_spike(1.0)
    spikes = [history.is_spike(10.0) for _ in range(NormHistory.REMEMBERED)]
    assert spikes[0] and not spikes[-1]

    history = NormHistory(0.0)
    assert not any(history.is_spike(norm) for norm in [1.0] * NormHistory.NEEDED + [1e9])
