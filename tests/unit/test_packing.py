"""Packed rows, with and without shared prompts: a step on them is the step on padded ones, whatever the model."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from grpo_trainer.batch.batching import ready
from grpo_trainer.batch.microbatches import Packed, layout
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine import attention
from grpo_trainer.engine.forward import MIXES, MORE_THAN_HEAD, build_forward
from grpo_trainer.errors import ConfigError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.load import compute_in
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.model.reference import FrozenWeights
from grpo_trainer.rollouts.groups import RolloutBatch
from grpo_trainer.trainer import Trainer
from tests.unit.factories import batch, refusing, sample
from tests.unit.test_trainer import EVERYTHING, assert_same, full_rollouts, gradients
from tests.unit.tiny_lora import KINDS, VOCAB, fill_b, tiny, tiny_qwen

# ---------------------------------------------------------------- attention

PLAIN = layout([3, 1, 5]), [[0, 1, 2], [3], [4, 5, 6, 7, 8]]
SHARED = (
    layout([4], [(3, [5, 4, 7]), (1, [4, 3])]),
    # the places that each sequence has: a prompt of 3 tokens at 0, one of 1 at 3, then what follows them, then the rest
    [[0, 1, 2, 4, 5], [0, 1, 2, 6], [0, 1, 2, 7, 8, 9, 10], [3, 11, 12, 13], [3, 14, 15], [16, 17, 18, 19]],
)


def attend(row: Packed, inputs: Sequence[Tensor], scale: float) -> tuple[Any, ...]:
    options = attention.arguments(row)
    return (*inputs, options["cu_seq_lens_q"], options["max_length_q"], scale, *options["shared_prompts"])


def alone(rows: list[list[int]], inputs: Sequence[Tensor]) -> Tensor:
    """Each sequence by torch's own attention."""
    whole = torch.zeros_like(inputs[0])
    for places in rows:
        one = (each[places].transpose(0, 1)[None] for each in inputs)
        out = scaled_dot_product_attention(*one, is_causal=True, scale=0.3, enable_gqa=True)  # type: ignore[misc]
        whole = whole.index_copy(0, torch.tensor(places), out[0].transpose(0, 1))
    return whole


@pytest.mark.parametrize(("row", "rows"), [PLAIN, SHARED], ids=["plain", "shared"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_attention_is_that_of_each_sequence_alone(row: Packed, rows: list[list[int]], heads: int, groups: int) -> None:
    torch.manual_seed(0)
    tokens = row.positions_1T.shape[1]
    inputs = [torch.randn(tokens, count, 8, requires_grad=True) for count in (heads, groups, groups)]
    factor = torch.randn(tokens, heads, 8)
    torch.library.opcheck(attention.packed_attention, attend(row, inputs, 0.3))
    out, normalisers = attention.packed_attention(*attend(row, inputs, 0.3))  # type: ignore[misc]
    torch.testing.assert_close(out, alone(rows, inputs), rtol=1e-6, atol=1e-6)
    if row is PLAIN[0]:  # of the sequence with one token: the logarithm of one weight
        assert normalisers[0, 3].item() == pytest.approx((0.3 * inputs[0][3, 0] @ inputs[1][3, 0]).item(), abs=1e-5)
    got = torch.autograd.grad((out * factor).sum(), inputs)
    wanted = torch.autograd.grad((alone(rows, inputs) * factor).sum(), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=3e-6)
    large = [100 * each.detach() for each in inputs]  # scores that are large on one side
    out, normalisers = attention.packed_attention(*attend(row, large, 1.0))  # type: ignore[misc]
    assert out.isfinite().all() and normalisers.isfinite().all()


# ---------------------------------------------------------------- models


def settings(**changes: Any) -> TrainConfig:
    values = {"batch_size": 100, "model_name": "tiny", "seq_len": 32, "max_grad_norm": 0}
    values["gradient_checkpointing"] = changes.pop("checkpointing", False)
    return TrainConfig.model_validate({**values, **changes.pop("loss", {}), **changes})


FORMS: dict[str, dict[str, Any]] = {
    "padded": {"packing": "off"},
    "packed": {"packing": "on", "share_prompts": "off"},
    "shared": {"packing": "on", "share_prompts": "on"},
}


def groups(seed: int = 0) -> RolloutBatch:
    """Four groups of four with a prompt for each, and two sequences with prompts of their own."""
    random = np.random.default_rng(seed)

    def made(prompt: list[int]) -> Any:
        return sample(prompt, random.integers(0, VOCAB, random.integers(1, 9)).tolist(), float(random.random()))

    prompts = [random.integers(0, VOCAB, length).tolist() for length in (9, 3, 1, 6)]
    return batch(*([made(prompt) for _ in range(4)] for prompt in prompts), [made([5, 5]), made([6])])


def one_step(
    model: nn.Module, config: TrainConfig, reference: Any = None, rollouts: RolloutBatch | None = None
) -> tuple[dict[str, float], list[Tensor]]:
    trainer = Trainer(model, config, reference=reference)
    return reduce(trainer.step(rollouts or full_rollouts(), 0).metrics), gradients(trainer)


@pytest.mark.parametrize(("budget", "checkpointing"), [(None, True), (32, False)], ids=["one", "several"])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_packed_and_shared_are_one_at_a_time(kind: str, budget: int | None, checkpointing: bool) -> None:
    base = tiny(kind)
    wanted = one_step(copy.deepcopy(base), settings(packing="off", batch_size=1), rollouts=groups())
    for form in FORMS.values():
        config = settings(**form, max_tokens_per_microbatch=budget, checkpointing=checkpointing)
        assert_same(wanted, one_step(copy.deepcopy(base), config, rollouts=groups()))


def test_packed_rows() -> None:
    made = {name: Trainer(tiny("qwen2"), settings(**form)).ready(groups()) for name, form in FORMS.items()}
    tokens = {name: sum(one.tokens_BT.numel() for one in batch.microbatches) for name, batch in made.items()}
    each = [len(one.tokens_T) for one in made["packed"].sequences]
    repeated = 3 * sum(group.samples[0].prompt_len for group in groups().groups[:4])
    assert tokens == {"padded": 18 * max(each), "packed": sum(each), "shared": sum(each) - repeated}

    model = tiny("qwen2")
    tokens = torch.randint(0, VOCAB, (2, 9))
    before = model(input_ids=tokens).logits
    assert build_forward(model, settings(packing="on")).packed
    torch.testing.assert_close(model(input_ids=tokens).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_every_loss_term_with_an_adapter(checkpointing: bool) -> None:
    """Policy, KL to the model without it, entropy, supervision, distillation."""
    results = []
    for form in FORMS.values():
        model = add_adapter(tiny_qwen(), BridgeConfig(weight_bridge_mode="lora_only", lora_r=8), seed=0)
        fill_b(model)
        config = settings(**form, loss={"loss": "gspo", **EVERYTHING}, checkpointing=checkpointing)
        results.append(one_step(model, config))
    for result in results[1:]:
        assert_same(results[0], result)
    assert results[0][0]["alignment/kl_reference"] > 0


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


def test_a_frozen_reference_is_packed_as_the_policy_is() -> None:
    results = []
    for packing in ("off", "on"):
        model, other = tiny("qwen2"), tiny("qwen2", initializer_range=0.1)
        weights = {name: value.detach() for name, value in other.named_parameters()}
        reference = FrozenWeights(model, weights, list(model.model.layers)).active
        results.append(one_step(model, settings(packing=packing, loss=EVERYTHING), reference))
    assert_same(*results)
    assert results[0][0]["alignment/kl_reference"] > 0.01


LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "first_k_dense_replace": 2},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
}
"""Latent attention: queries and keys of 32, values of 16."""


CAPPED = {"head_dim": 8, "final_logit_softcapping": 30.0}


@pytest.mark.parametrize(("kind", "changes"), [("qwen2", {}), ("gemma2", CAPPED)])
@pytest.mark.parametrize("masters", [False, True], ids=["16 bits", "fp32 that computes in 16"])
def test_logits_are_exact_where_it_is_asked_for(kind: str, changes: dict[str, Any], masters: bool) -> None:
    """Also the model's own, which proofs take, and models that do more to them."""
    for asked, exact in (("auto", False), ("model", False), ("float32", True)):
        plan = build_forward(tiny("qwen2").bfloat16(), settings(packing="on", logits_dtype=asked)).plan
        assert plan.dtype == torch.bfloat16 and plan.logits_dtype == (torch.float32 if exact else torch.bfloat16)
        assert plan.rows(1000) == plan.chunk_bytes // (1000 * plan.logits_dtype.itemsize) // 128 * 128
    config = TrainConfig(model_name="tiny", dtype="bfloat16", logits_dtype="float32", training_steps=9)
    plain = tiny(kind, **changes) if masters else tiny(kind, **changes).bfloat16()
    model = copy.deepcopy(plain)
    for each in (plain, model):
        if masters:
            compute_in(each, config)
    forward = build_forward(model, config)
    assert (forward.head is None) == bool(changes)  # what does more to its logits is asked for them
    tokens = torch.randint(0, VOCAB, (2, 9))
    logits, rounded = model(input_ids=tokens).logits, plain(input_ids=tokens).logits
    assert logits.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    assert 0 < (logits - rounded.float()).abs().max() < 2**-7 * logits.abs().max()
    logits.square().sum().backward()
    rounded.float().square().sum().backward()
    for (name, got), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert got.grad is not None and wanted.grad is not None and got.grad.dtype == wanted.grad.dtype == got.dtype
        assert (got.grad - wanted.grad).float().norm() < 0.05 * wanted.grad.float().norm(), name


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mistral", {"sliding_window": 8}, "window 8"),
        ("gemma2", {"head_dim": 8}, "Gemma2ForCausalLM caps"),
        ("qwen2", {"hidden_size": 16}, "heads size 4"),
        ("deepseek_v3", LATENT, "values head size"),
        ("granite", {"logits_scaling": 4.0}, f"GraniteForCausalLM {MORE_THAN_HEAD}"),
        ("cohere", {}, f"CohereForCausalLM {MORE_THAN_HEAD}"),
    ],
)
def test_what_cant_be_packed_is_said_and_padded(kind: str, changes: dict[str, Any], words: str) -> None:
    with refusing(ConfigError, "--packing", got="on") as refused:
        build_forward(tiny(kind, **changes), settings(packing="on"))
    assert set(words.split()) <= set(re.findall(r"\w+", refused.value.summary))
    model = tiny(kind, **changes)
    base = copy.deepcopy(model)
    assert not build_forward(model, settings()).packed
    wanted = one_step(base, settings(batch_size=1))
    assert_same(wanted, one_step(model, settings()))


def test_a_model_whose_layers_mix_sequences_is_found_out() -> None:
    class Leaky(nn.Module):
        """Adds the token before, wherever that belongs."""

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + torch.roll(hidden, 1, dims=1)

    model = tiny("qwen2")
    model.model.norm = nn.Sequential(model.model.norm, Leaky())
    with pytest.raises(ConfigError) as refused:
        build_forward(model, settings(packing="on"))
    assert refused.value.summary == f"Qwen2ForCausalLM: {MIXES}"
    assert model.config._attn_implementation == "sdpa"


def test_shared_prompts_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^--share-prompts") as error:
        build_forward(tiny("qwen2"), settings(packing="off", share_prompts="on"))
    assert "Qwen2ForCausalLM" not in str(error.value)  # any model would be refused
    assert not build_forward(tiny("qwen2"), settings(packing="off")).shared
    assert not build_forward(tiny("qwen2"), settings(packing="on", share_prompts="off")).shared
    assert build_forward(tiny("qwen2"), settings(packing="on")).shared

    # As an attention would that ignores its arguments.
    options = attention.arguments
    deaf = {"shared_prompts": attention.NONE_SHARED}
    monkeypatch.setattr(attention, "arguments", lambda packed: {**options(packed), **deaf})
    assert not build_forward(tiny("qwen2"), settings(packing="on")).shared
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM"):
        build_forward(tiny("qwen2"), settings(packing="on", share_prompts="on"))


@pytest.mark.parametrize("packing", ["on", "off"])
def test_weights_in_fp32_compute_in_16_bits_under_autocast(packing: str) -> None:
    """As all weights are trained where they are not the server's: decoder and head compute in `--dtype`."""
    exact, model = tiny("qwen2"), tiny("qwen2")
    for part in (model, model.base_model):
        part.forward = torch.autocast("cpu", torch.bfloat16)(part.forward)
    trainer = Trainer(model, settings(packing=packing, dtype="bfloat16"))
    assert trainer.forward.plan.dtype == torch.bfloat16 and trainer.forward.head is not None
    (microbatch,) = trainer.ready(full_rollouts()).microbatches
    found = trainer.forward.scores(microbatch).logprobs_N
    wanted = Trainer(exact, settings(packing=packing)).forward.scores(microbatch).logprobs_N
    error = (found - wanted).abs().mean().item()
    assert 1e-4 < error < 0.1
    found.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
