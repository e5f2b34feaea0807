"""From an environment's completions to the trainer's logprobs: masks, and groups that can't be trained on."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from environments.api import intake, wire
from environments.peers.inference import Completion
from environments.trajectory import Trajectory, scored_group
from grpo_trainer.batch.batching import prepare, ready
from grpo_trainer.batch.microbatches import split
from grpo_trainer.batch.token_masks import LEFT_OUT, TokenMasks
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.config.train import ModelConfig, TrainConfig
from grpo_trainer.engine.forward import Forward
from grpo_trainer.engine.head import HeadPlan, head_scores
from grpo_trainer.engine.logprobs import token_scores
from grpo_trainer.rollouts.decode import to_group
from grpo_trainer.rollouts.filter import GroupFilter, misfit
from grpo_trainer.rollouts.sampling_masks import SamplingMasks, decode
from grpo_trainer.rollouts.types import Group, RolloutBatch
from tests.unit.factories import VOCAB, TinyModel
from vllm_server.sampling_masks import encode

CONFIG = TrainConfig(model=ModelConfig(name="m", seq_len=10), batch_size=2)


def completion(prompt: list[int], tokens: list[int], kept: dict[int, list[int]] | None, **more: Any) -> Completion:
    """A completion whose positions `kept` have masks; None: the server gave none."""
    rows = {at: np.array((kept or {}).get(at, []), np.int64) for at in range(len(tokens))}
    masks = None if kept is None else encode(rows, len(tokens))
    logprobs = [-0.5] * len(tokens)
    fields: dict[str, Any] = {"cuts": {"top_k": 2}, "sampling_masks": masks, **more}
    return Completion(prompt, tokens, logprobs, "", "stop", 3, **fields)


FIRST = completion([1, 2], [5, 6, 7], {0: [5, 8], 2: [0, 7]})
SECOND = completion([1, 2], [4, 3, 2], {0: [4], 1: [3, 9]})


def posted(*completions: Completion) -> wire.ScoredData:
    return scored_group([Trajectory.of(one, float(score)) for score, one in enumerate(completions)])


def group(data: wire.ScoredData, content_type: str = wire.MSGPACK) -> Group:
    """As the trainer gets it from the rollout API."""
    kept = intake.read_one(wire.encode_group(data, content_type), content_type)
    return to_group(wire.decode(kept.payload, wire.PackedGroup, wire.MSGPACK))


@pytest.mark.parametrize("content_type", [wire.MSGPACK, wire.JSON])
def test_masks_come_through_the_rollout_api(content_type: str) -> None:
    found = group(posted(FIRST, SECOND), content_type)
    assert misfit(found, VOCAB) is None and found.says_sampling
    masks = [sample.masks for sample in found.samples]
    assert masks[0] is not None and masks[1] is not None
    assert masks[0].counts_T.tolist() == [0, 0, 2, 0, 2] and masks[0].ids_M.tolist() == [5, 8, 0, 7]
    assert masks[1].counts_T.tolist() == [0, 0, 1, 2, 0] and masks[1].ids_M.tolist() == [4, 3, 9]


def test_a_plain_group_has_no_masks_and_no_field_for_them() -> None:
    plain = completion([1], [2], None, cuts={})
    data = posted(plain, plain)
    assert data.sampling_masks is None and data.generation_params == {"temperature": 1.0}
    assert b"sampling_masks" not in wire.encode_group(data)
    (microbatch,) = ready(RolloutBatch("b", (group(data),)), CONFIG).microbatches
    assert microbatch.masks is None


def test_how_tokens_were_sampled_is_said_once_or_for_each() -> None:
    assert posted(FIRST, SECOND).generation_params == {"temperature": 1.0, "top_k": 2}
    mixed = posted(FIRST, replace(SECOND, cuts={"top_p": 0.9}))
    assert mixed.generation_params is None
    assert mixed.overrides == [{"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "top_p": 0.9}]


# ---------------------------------------------------------------- groups that can't be trained on


def refused(data: wire.ScoredData) -> Any:
    problem = misfit(group(data), VOCAB)
    assert problem is not None and problem.got and problem.wanted and problem.fix
    return problem


def test_the_masks_of_another_request_are_noticed() -> None:
    """Planted fault: the masks of two completions of the same length are exchanged."""
    swapped = posted(
        replace(FIRST, sampling_masks=SECOND.sampling_masks), replace(SECOND, sampling_masks=FIRST.sampling_masks)
    )
    problem = refused(swapped)
    assert problem.field == "sequence 0: sampling_masks"
    assert "token 5" in problem.got and "position 2" in problem.got


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (posted(replace(FIRST, sampling_masks=None), SECOND), "sequence 0: top_k"),
        (posted(replace(FIRST, sampling_masks=b"\xff"), SECOND), "sequence 0: sampling_masks"),
        (posted(FIRST, completion([1, 2], [4], {0: [4, VOCAB]})), "sequence 1: sampling_masks"),
    ],
    ids=["no masks", "broken", "beyond the vocabulary"],
)
def test_masks_that_are_of_no_use(data: wire.ScoredData, field: str) -> None:
    assert refused(data).field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"generation_params": {"repetition_penalty": 1.1}}, "sequence 0: repetition_penalty"),
        ({"generation_params": None, "overrides": [{}, {"min_tokens": 2}]}, "sequence 1: min_tokens"),
        ({"group_overrides": {"logit_bias": {"1": 2.0}}}, "sequence 0: logit_bias"),
        ({"distill_token_ids": [[[]] * 4 + [[1]]] * 2, "distill_logprobs": [[[]] * 4 + [[-1.0]]] * 2}, "distill"),
    ],
)
def test_sampling_that_the_trainer_cant_follow(fields: dict[str, Any], field: str) -> None:
    data = posted(FIRST, SECOND)
    changed = {name: getattr(data, name) for name in data.__struct_fields__} | fields
    assert field in refused(wire.ScoredData(**changed)).field


def test_what_is_imitated_may_have_been_sampled_in_any_way() -> None:
    data = posted(replace(FIRST, sampling_masks=SECOND.sampling_masks), SECOND)
    changed = {name: getattr(data, name) for name in data.__struct_fields__}
    changed["group_overrides"] = {"sft": True, "repetition_penalty": 1.1}
    found = group(wire.ScoredData(**changed))
    assert misfit(found, VOCAB) is None
    (microbatch,) = ready(RolloutBatch("b", (found,)), CONFIG).microbatches
    assert microbatch.masks is None


def test_an_environment_that_does_not_say_how_it_samples_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    silent = replace(group(posted(FIRST, SECOND)), says_sampling=False)
    without = replace(silent, samples=tuple(replace(s, rollout_logprobs_T=None) for s in silent.samples))
    groups = GroupFilter(VOCAB, lambda number: f"sums_{number}")

    def warnings_of(*found: Group) -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            groups.sift(RolloutBatch("b", found))
        return len(caplog.records)

    assert warnings_of(replace(silent, says_sampling=True), without) == 0
    assert warnings_of(silent, silent, replace(silent, environment=7)) == 2
    assert warnings_of(silent) == 0


# ---------------------------------------------------------------- logprobs


def by_hand(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor, masks: SamplingMasks) -> tuple[Tensor, Tensor]:
    """Logprob and entropy of each token over its own kept ids, one by one, in double precision."""
    found, ends = [], np.cumsum(masks.counts_T)
    for row, (logits, target, temperature) in enumerate(zip(logits_NV.double(), targets_N, temperature_N, strict=True)):
        kept = masks.ids_M[ends[row] - masks.counts_T[row] : ends[row]].tolist() or [*range(len(logits))]
        all_v = (logits[kept] / temperature.double()).log_softmax(-1)
        found.append(torch.stack([all_v[kept.index(int(target))], -(all_v.exp() * all_v).sum()]))
    return tuple(torch.stack(found).T)  # type: ignore[return-value]


def random_masks(targets_N: Tensor, vocab: int) -> SamplingMasks:
    """A random set with each target; the first token of every three has none."""
    draw = np.random.default_rng(0)
    rows = [sorted({int(target), *draw.integers(0, vocab, 4)}) if n % 3 else [] for n, target in enumerate(targets_N)]
    counts = np.array([len(row) for row in rows])
    return SamplingMasks(counts, np.array([i for row in rows for i in row], np.int32))


N, H, V = 300, 8, 37


@pytest.mark.parametrize("kept_bytes", [0, 1 << 30], ids=["again", "kept"])
@pytest.mark.parametrize("entropy_gradient", [False, True], ids=["plain", "entropy"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
def test_the_head_renormalises_over_the_kept_tokens(trained: bool, entropy_gradient: bool, kept_bytes: int) -> None:
    torch.manual_seed(0)
    hidden, weight, targets = 0.5 * torch.randn(N, H), torch.randn(V, H), torch.randint(0, V, (N,))
    temperature, none = torch.rand(N) + 0.5, torch.zeros(N, 0, dtype=torch.int64)
    hidden.requires_grad_()
    weight.requires_grad_(trained)
    masks = random_masks(targets, V)
    token_masks = TokenMasks.of([masks], [N])
    plan = HeadPlan(torch.float32, torch.float32, chunk_bytes=0, kept_bytes=kept_bytes)
    scores = head_scores(
        hidden, weight, None, targets, temperature, none, plan, token_masks, entropy_gradient=entropy_gradient
    )
    wanted = by_hand(hidden @ weight.T, targets, temperature, masks)
    factors = torch.randn(2, N)
    for got, each in zip((scores.logprobs_N, scores.entropy_N), wanted, strict=True):
        torch.testing.assert_close(got.double(), each, rtol=1e-6, atol=2e-6)
    leaves = [hidden, weight] if trained else [hidden]

    def gradients(logprobs: Tensor, entropy: Tensor) -> Any:
        loss = (factors[0] * logprobs).sum() + ((factors[1] * entropy).sum() if entropy_gradient else 0.0)
        return torch.autograd.grad(loss, leaves, retain_graph=True)

    found = gradients(scores.logprobs_N, scores.entropy_N)
    for got, each in zip(found, gradients(wanted[0].float(), wanted[1].float()), strict=True):
        torch.testing.assert_close(got, each, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("entropy_gradient", [False, True], ids=["plain", "entropy"])
def test_so_do_whole_logits(entropy_gradient: bool) -> None:
    torch.manual_seed(0)
    logits_BTV = torch.randn(2, 6, V, requires_grad=True)
    tokens_BT, rows, columns = torch.randint(0, V, (2, 6)), torch.tensor([0, 0, 1, 1]), torch.tensor([2, 5, 1, 3])
    targets, temperature = tokens_BT[rows, columns], torch.tensor([1.0, 0.7, 1.3, 1.0])
    masks = random_masks(targets, V)
    scores = token_scores(
        logits_BTV, tokens_BT, rows, columns, temperature, None, TokenMasks.of([masks], [4]),
        entropy_gradient=entropy_gradient,
    )  # fmt: skip
    wanted = by_hand(logits_BTV[rows, columns - 1], targets, temperature, masks)
    for got, each in zip((scores.logprobs_N, scores.entropy_N), wanted, strict=True):
        torch.testing.assert_close(got.double(), each, rtol=1e-6, atol=2e-6)
    pairs = (scores.logprobs_N, scores.entropy_N), wanted
    loss, other = (one.sum() + (two.sum() if entropy_gradient else 0.0) for one, two in pairs)
    (got,), (each,) = (torch.autograd.grad(one, logits_BTV) for one in (loss, other))
    torch.testing.assert_close(got, each, rtol=1e-5, atol=1e-6)
    assert not got[0, 0].any()  # predicts no trained token


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_a_slice_of_tokens_has_its_own_masks(counts: list[list[int]], data: Any) -> None:
    """Whatever chunk of a microbatch the head takes."""
    ids = [np.concatenate([np.arange(n, dtype=np.int32) for n in own]) for own in counts]
    masks = [SamplingMasks(np.array(own), own_ids) for own, own_ids in zip(counts, ids, strict=True)]
    given_masks = [data.draw(st.sampled_from([one, None])) for one in masks]
    flat = [n if one else 0 for own, one in zip(counts, given_masks, strict=True) for n in own]
    found = TokenMasks.of(given_masks, [len(own) for own in counts])
    if found is None:
        assert not any(given_masks)
        return
    start = data.draw(st.integers(0, len(flat) - 1))
    stop = data.draw(st.integers(start + 1, len(flat)))
    logits = found.keep_only_(torch.zeros(stop - start, 4), slice(start, stop))
    wanted = [[0.0 if i < n or not n else LEFT_OUT for i in range(4)] for n in flat[start:stop]]
    torch.testing.assert_close(logits, torch.tensor(wanted))


def test_microbatches_have_the_masks_of_their_own_tokens() -> None:
    """Through truncation, and sequences in another order; the tiny model's logprobs are those by hand."""
    # four scores, none of which is their mean: each sequence has an advantage
    found = group(posted(FIRST, SECOND, completion([1], [9, 8], {1: [3, 8]}, cuts={"top_p": 0.9}), FIRST))
    prepared = prepare(RolloutBatch("b", (found,)), LossConfig(), 4)
    model = TinyModel()
    forward = Forward(model, None, None, HeadPlan(torch.float32, torch.float32), packed=False)
    for microbatch in split(prepared.sequences, 2):
        got = forward.scores(microbatch).logprobs_N.detach()
        logits = model(microbatch.tokens_BT, False).logits  # type: ignore[attr-defined]
        at = microbatch.rows_N, microbatch.columns_N
        for n, (row, column) in enumerate(zip(*at, strict=True)):
            tokens = microbatch.tokens_BT[row]
            kept = {(2, 5): [5, 8], (2, 4): [4], (3, 3): [3, 9], (2, 8): [3, 8]}.get((int(column), int(tokens[column])))
            ids = torch.tensor(kept or [*range(VOCAB)])
            own = logits[row, column - 1, ids].log_softmax(-1)[(ids == tokens[column]).nonzero()[0, 0]]
            assert got[n].item() == pytest.approx(own.item(), abs=1e-6)


def test_masks_of_a_completion_by_hand() -> None:
    assert FIRST.sampling_masks is not None
    assert decode(FIRST.sampling_masks, 3).counts_T.tolist() == [2, 0, 2]
