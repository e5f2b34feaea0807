"""Prompts that stand in a row once: who goes together, where tokens lie, and that a step is the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from grpo_trainer.batch.batching import deal, ready
from grpo_trainer.batch.microbatches import TrainingSequence, split
from grpo_trainer.batch.shared_prompts import by_family, deal_families, families, plan_shared
from grpo_trainer.config.bridge import LoraOnly
from grpo_trainer.engine.attention import arguments, packed_attention
from grpo_trainer.engine.forward import build_forward
from grpo_trainer.errors import ConfigError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.rollouts.types import RolloutBatch
from grpo_trainer.trainer import Trainer
from tests.unit.factories import batch, sample
from tests.unit.test_packing import one_step, settings, tiny
from tests.unit.test_trainer import EVERYTHING, assert_same, gradients
from tests.unit.tiny_lora import VOCAB, fill_b, tiny_qwen


def sequence(prompt: list[int], completion: list[int], trained: list[int] | None = None) -> TrainingSequence:
    """`trained`: places in the completion; the first is always."""
    places = np.array([0, *(range(1, len(completion)) if trained is None else trained)]) + len(prompt)
    ones = np.ones(len(places), np.float32)
    return TrainingSequence(np.array(prompt + completion), places, ones, None, 0.5, 1.0)


FAMILY = [sequence([1, 2, 3], [4, 5]), sequence([7], [8, 9]), sequence([1, 2, 3], [6]), sequence([1, 2], [3, 4])]


def test_the_same_prompt_makes_a_family() -> None:
    prompts = [each.tokens_T[: each.prompt_len] for each in FAMILY]
    assert families(prompts) == [[0, 2], [1], [3]]
    assert by_family([[0, 2], [1], [3]], [5, 3, 4, 4]) == [0, 2, 3, 1]


def test_where_tokens_lie() -> None:
    """Prompts, then what follows each, then the others; the first trained token is predicted at its prompt's end."""
    (one,) = split(FAMILY, 10, packed=True, shared=True)
    # the order of the plan: 0, 2, 3, 1
    assert one.tokens_BT.tolist() == [[1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 7, 8, 9]]
    assert one.packed is not None and one.packed.shared is not None
    assert one.packed.boundaries.tolist() == [0, 3, 5, 6, 10, 13] and one.packed.longest == 4
    assert one.packed.positions_1T.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 0, 1, 2]]
    shared = one.packed.shared
    assert (shared.prompts.tolist(), shared.readers.tolist()) == ([0, 3], [0, 3])
    assert (shared.longest_prompt, shared.longest_readers, shared.first, shared.last) == (3, 3, 3, 6)
    assert shared.prompts.dtype == shared.readers.dtype == torch.int32
    assert one.targets_N.tolist() == [4, 5, 6, 3, 4, 8, 9]
    assert one.predictors_N.tolist() == [2, 3, 2, 7, 8, 10, 11]


def test_untrained_tokens_in_between_stay_where_they_are() -> None:
    """A tool's answer, say: its tokens are seen, and not predicted."""
    turns = [sequence([1, 2], [3, 4, 5, 6], trained=[3]), sequence([1, 2], [7])]
    (one,) = split(turns, 10, packed=True, shared=True)
    assert one.tokens_BT.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert (one.targets_N.tolist(), one.predictors_N.tolist()) == ([3, 6, 7], [1, 4, 1])


def test_a_row_without_a_family_has_the_same_kind_of_layout() -> None:
    """So torch has no other graph to compile for it: the first sequence counts as a family."""
    (one,) = split([FAMILY[1], FAMILY[3]], 10, packed=True, shared=True)
    assert one.packed is not None and one.packed.shared is not None
    # the order of the plan: 3, 1
    assert one.tokens_BT.tolist() == [[1, 2, 3, 4, 7, 8, 9]]
    assert one.packed.boundaries.tolist() == [0, 2, 4, 7] and one.packed.positions_1T.tolist() == [
        [0, 1, 2, 3, 0, 1, 2]
    ]
    shared = one.packed.shared
    assert (shared.prompts.tolist(), shared.readers.tolist()) == ([0, 2], [0, 2])
    assert (one.targets_N.tolist(), one.predictors_N.tolist()) == ([3, 4, 8, 9], [1, 2, 4, 5])


SEQUENCES = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=30)


@given(SEQUENCES, st.integers(1, 120), st.integers(1, 5))
def test_all_are_planned_once_within_the_budget(drawn: list[tuple[int, int]], budget: int, processes: int) -> None:
    """Prompt n has 3 n + 1 tokens."""
    kin = families([np.array([number]) for number, _ in drawn])
    prompts = [3 * number + 1 for number, _ in drawn]
    lengths = [prompt + own for prompt, (_, own) in zip(prompts, drawn, strict=True)]
    plan = plan_shared(kin, prompts, lengths, size=7, max_tokens=budget)
    assert sorted(index for one in plan for index in one) == list(range(len(drawn)))

    def load(one: list[int]) -> int:
        return sum(3 * n + 1 for n in {drawn[i][0] for i in one}) + sum(drawn[i][1] for i in one)

    assert all(load(one) <= budget or len(one) == 1 for one in plan)
    loads = list(map(load, plan))
    assert loads == sorted(loads, reverse=True)
    dealt = deal_families(kin, prompts, lengths, processes)
    assert sorted(index for share in dealt for index in share) == list(range(len(drawn)))
    assert len(dealt) == processes


def test_plan_shared_counts_a_repeated_prompt() -> None:
    """A prompt of 8 tokens, nine completions of 4: a row has 8 + 3 x 4 = 20 tokens, also if it repeats the prompt."""
    plan = plan_shared([[*range(9)]], [8] * 9, [12] * 9, size=7, max_tokens=20)
    assert [len(one) for one in plan] == [3, 3, 3]


def test_families_are_cut_where_a_share_is_full() -> None:
    group = [sequence([1] * 8, [2 + n, 3, 4, 5]) for n in range(4)]
    other = [sequence([2] * 8, [2 + n, 3, 4, 5]) for n in range(4)]
    shares = deal([*group, *other], 2, shared=True)
    assert [{int(each.tokens_T[0]) for each in share} for share in shares] == [{1}, {2}]
    assert [len(share) for share in deal(group, 4, shared=True)] == [1, 1, 1, 1]
    assert deal([], 2, shared=True) == [[], []]


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_attention_is_that_of_each_sequence_alone(heads: int, groups: int) -> None:
    torch.manual_seed(0)
    made = [*FAMILY, sequence([7], [1, 1, 1]), sequence([1, 2, 3], [9, 9, 9, 9])]
    (one,) = split(made, 10, packed=True, shared=True)
    assert one.packed is not None
    options = arguments(one.packed)
    tokens = one.tokens_BT.shape[1]
    assert tokens == 3 + (2 + 1 + 4) + 1 + (2 + 3) + 4
    inputs = [torch.randn(tokens, count, 8, requires_grad=True) for count in (heads, groups, groups)]
    args = (*inputs, options["cu_seq_lens_q"], options["max_length_q"], 0.3, *options["shared_prompts"])
    torch.library.opcheck(packed_attention, args)
    out, _ = packed_attention(*args)  # type: ignore[misc]

    def wanted() -> torch.Tensor:
        """Row by row: the places that each sequence has."""
        whole = torch.zeros(tokens, heads, 8)
        rows = [[0, 1, 2, *own] for own in ([4, 5, 6, 7], [8, 9], [10])]
        rows += [[3, *own] for own in ([11, 12, 13], [14, 15])]
        rows += [[16, 17, 18, 19]]
        for row in rows:
            own = (each[row].transpose(0, 1)[None] for each in inputs)
            alone = scaled_dot_product_attention(*own, is_causal=True, scale=0.3, enable_gqa=True)  # type: ignore[misc]
            whole[row] = alone[0].transpose(0, 1)
        return whole

    torch.testing.assert_close(out, wanted(), rtol=1e-6, atol=1e-6)
    factor = torch.randn(tokens, heads, 8)
    got = torch.autograd.grad((out * factor).sum(), inputs)
    for one_grad, other in zip(got, torch.autograd.grad((wanted() * factor).sum(), inputs), strict=True):
        torch.testing.assert_close(one_grad, other, rtol=1e-5, atol=3e-6)


def test_large_scores_on_one_side_do_not_overflow() -> None:
    (one,) = split(FAMILY, 10, packed=True, shared=True)
    assert one.packed is not None
    options = arguments(one.packed)
    inputs = [100 * torch.randn(13, 1, 8) for _ in range(3)]
    out, normalisers = packed_attention(
        *inputs, options["cu_seq_lens_q"], options["max_length_q"], 1.0, *options["shared_prompts"]
    )  # type: ignore[misc]
    assert out.isfinite().all() and normalisers.isfinite().all()


# ---------------------------------------------------------------- steps


def groups(seed: int = 0) -> RolloutBatch:
    """Four groups of four with prompts of their own, one of them alone in having its prompt."""
    random = np.random.default_rng(seed)

    def made(prompt: list[int]) -> Any:
        return sample(prompt, random.integers(0, VOCAB, random.integers(1, 9)).tolist(), float(random.random()))

    prompts = [random.integers(0, VOCAB, length).tolist() for length in (9, 3, 1, 6)]
    return batch(*([made(prompt) for _ in range(4)] for prompt in prompts), [made([5, 5]), made([6])])


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("budget", [None, 32, 48], ids=["size", "few", "many"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mixtral", "phi3"])
def test_a_step_is_that_of_each_sequence_with_its_prompt(kind: str, budget: int | None, checkpointing: bool) -> None:
    base = tiny(kind)
    steps: list[Any] = []
    for share in ("off", "on"):
        config = settings(
            packing="on", share_prompts=share, max_tokens_per_microbatch=budget, checkpointing=checkpointing
        )
        trainer = Trainer(copy.deepcopy(base), config)
        metrics = reduce(trainer.step(groups(), 0).metrics)
        tokens = sum(one.tokens_BT.numel() for one in trainer.ready(groups()).microbatches)
        steps.append((metrics, gradients(trainer), tokens))
    assert steps[1][2] < 0.8 * steps[0][2]
    assert_same(steps[0][:2], steps[1][:2])


def test_every_loss_term_with_an_adapter() -> None:
    results = []
    for share in ("off", "on"):
        model = add_adapter(tiny_qwen(), LoraOnly(mode="lora_only", r=8), seed=0)
        fill_b(model)
        config = settings(packing="on", share_prompts=share, loss={"loss": "gspo", **EVERYTHING})
        results.append(one_step(model, config))
    assert_same(*results)


def test_what_processes_learn_from_their_shares_adds_up() -> None:
    base = tiny("qwen2")
    config = settings(packing="on", max_tokens_per_microbatch=40)
    whole = Trainer(copy.deepcopy(base), config)
    whole.step(groups(), 0)
    dealt = ready(groups(), config, packed=True, shared=True, processes=3)
    parts = []
    for microbatches in (dealt.microbatches, *dealt.others):
        assert microbatches
        one = Trainer(copy.deepcopy(base), config)
        one.step(replace(dealt, microbatches=microbatches, others=()), 0)
        parts.append(gradients(one))
    for wanted, *shares in zip(gradients(whole), *parts, strict=True):
        torch.testing.assert_close(sum(shares), wanted, rtol=1e-5, atol=1e-6)


def test_what_can_not_be_had_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--share-prompts") as error:
        build_forward(tiny("qwen2"), settings(packing="off", share_prompts="on"))
    assert "Qwen2ForCausalLM" not in str(error.value)  # any model would be refused
    assert not build_forward(tiny("qwen2"), settings(packing="off")).shared
    assert not build_forward(tiny("qwen2"), settings(packing="on", share_prompts="off")).shared
    assert build_forward(tiny("qwen2"), settings(packing="on")).shared


def test_a_model_that_does_not_see_the_prompt_has_it_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an attention would that ignores its arguments."""
    from grpo_trainer.engine import attention

    options = attention.arguments
    deaf = {"shared_prompts": attention.NONE_SHARED}
    monkeypatch.setattr(attention, "arguments", lambda packed: {**options(packed), **deaf})
    assert not build_forward(tiny("qwen2"), settings(packing="on")).shared
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM"):
        build_forward(tiny("qwen2"), settings(packing="on", share_prompts="on"))
