"""The loss and its gradient on the same tensors, here and in TRL's GRPOTrainer: `python scripts/compare_trl.py`.

Needs `pip install --no-deps trl==1.16.0` and what TRL needs (accelerate, datasets). A small random model, completions
of different lengths, logprobs that put ratios on both sides of every clip. Prints one line a case; exits with 1 if a
difference is larger than fp32 explains. What is known to differ is in docs/papers.md.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_trainer.batch.batching import prepare
from grpo_trainer.batch.microbatches import split
from grpo_trainer.config.train import LossConfig
from grpo_trainer.engine.logprobs import token_scores
from grpo_trainer.losses import batch_loss
from grpo_trainer.rollouts.types import Group, RolloutBatch, Sample
from grpo_trainer.trainer import Pass, loss_inputs

VOCAB, PROMPT, LENGTHS, TEMPERATURE, LONGEST = 97, 5, (1, 3, 4, 6, 6, 9, 10, 12), 0.7, 16
TOLERANCE = 2e-5
"""Of losses around 1, and of gradients relative to the largest entry."""


@dataclass(frozen=True)
class Case:
    """One loss by our options and by TRL's attributes."""

    name: str
    ours: dict[str, Any]
    trl: dict[str, Any]
    args: dict[str, Any] = field(default_factory=dict)


CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.2}
CASES = (
    Case("grpo", {"loss": "grpo"}, {"loss_type": "grpo"}),
    Case("bnpo", {"loss": "bnpo"}, {"loss_type": "bnpo"}),
    Case("dapo", {"loss": "dapo"}, {"loss_type": "dapo"}),
    Case("dr_grpo", {"loss": "dr_grpo", "max_completion_len": LONGEST}, {"loss_type": "dr_grpo"}),
    Case("gspo", {"loss": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    Case("cispo", {"loss": "cispo", "clip_eps_high": 0.2}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    Case("sapo", {"loss": "sapo", "sapo_tau_neg": 2.0}, {"loss_type": "sapo"}, {"sapo_temperature_neg": 2.0}),
    Case("clip-higher", {"loss": "dapo", "clip_eps_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    Case("dual clip", {"loss": "grpo", "dual_clip": 1.5}, {"loss_type": "grpo"}, {"delta": 1.5}),
    Case("KL", {"loss": "grpo", "kl_beta": 0.1}, {"loss_type": "grpo", "beta": 0.1}),
    Case("KL, dapo", {"loss": "dapo", "kl_beta": 0.1}, {"loss_type": "dapo", "beta": 0.1}),
    Case(
        "KL, unbiased",
        {"loss": "dapo", "kl_beta": 0.1, "kl_unbiased": True},
        {"loss_type": "dapo", "beta": 0.1},
        {"use_bias_correction_kl": True},
    ),
    Case(
        "entropy",
        {"loss": "grpo", "entropy_coef": 0.1},
        {"loss_type": "grpo", "entropy_coef": 0.1, "_entropy_bonus_enabled": True},
    ),
    *(
        Case(
            f"{name}, {kind} by {level}",
            {"loss": name, "ratio_against": "trainer", "is_correction": kind, "is_level": level, "is_cap": 1.3},
            {
                "loss_type": name,
                "use_vllm": True,
                "vllm_importance_sampling_mode": f"{level}_{kind}",
                "epsilon_high": 1.2 if name == "cispo" else 0.2,
            },
        )
        for name in ("dapo", "cispo", "sapo")
        for kind in ("truncate", "mask")
        for level in ("token", "sequence")
    ),
)


@dataclass(frozen=True)
class Data:
    """A batch of B sequences; what belongs to completions is padded to the longest."""

    prompt_BP: Tensor
    completion_BC: Tensor
    mask_BC: Tensor
    old_BC: Tensor
    roll_BC: Tensor
    ref_BC: Tensor
    advantages_B: Tensor


def make_model() -> Qwen2ForCausalLM:
    """Small and random."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(config).train()


def make_data(model: Qwen2ForCausalLM) -> Data:
    """Logprobs scatter around the model's own."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(LENGTHS), max(LENGTHS))
    prompt_BP = torch.randint(2, VOCAB, (shape[0], PROMPT), generator=generator)
    completion_BC = torch.randint(2, VOCAB, shape, generator=generator)
    mask_BC = (torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]).int()
    with torch.no_grad():
        logits = model(torch.cat([prompt_BP, completion_BC], 1)).logits[:, PROMPT - 1 : -1].float() / TEMPERATURE
    own_BC = torch.log_softmax(logits, -1).gather(-1, completion_BC[..., None])[..., 0]

    def near(logprobs: Tensor, spread: float) -> Tensor:
        return logprobs + spread * torch.randn(shape, generator=generator)

    old_BC = near(own_BC, 0.5)
    return Data(
        prompt_BP, completion_BC, mask_BC, old_BC, near(old_BC, 0.2), near(own_BC, 0.3),
        torch.randn(shape[0], generator=generator),
    )  # fmt: skip


def ours(model: Qwen2ForCausalLM, data: Data, options: dict[str, Any]) -> tuple[float, list[Tensor]]:
    """Loss and gradients here. Without a correction the ratio is against `old` by way of the server's logprobs."""
    config = LossConfig(**{"ratio_against": "rollout", **options})
    said_BC = data.old_BC if config.ratio_against == "rollout" else data.roll_BC
    samples = []
    for i, length in enumerate(LENGTHS):
        tokens = torch.cat([data.prompt_BP[i], data.completion_BC[i, :length]]).numpy()
        trained = np.arange(len(tokens)) >= PROMPT
        logprobs = np.concatenate([np.ones(PROMPT), said_BC[i, :length].numpy()]).astype(np.float32)
        advantages = np.full(len(tokens), float(data.advantages_B[i]), np.float32)
        samples.append(Sample(tokens, trained, 0.0, advantages, logprobs, temperature=TEMPERATURE))
    prepared = prepare(RolloutBatch("b", (Group(tuple(samples)),)), config, 64)
    (microbatch,) = split(prepared.sequences, len(samples))  # sorted by length, as they are
    one, flat = Pass(microbatch), data.mask_BC.bool()
    one.old_logprobs_N = data.old_BC[flat]
    one.ref_logprobs_N = data.ref_BC[flat] if config.kl_beta else None
    scores = token_scores(
        model(input_ids=microbatch.tokens_BT).logits,
        *(microbatch.tokens_BT, microbatch.rows_N, microbatch.columns_N, microbatch.temperature_N),
        entropy_gradient=True,
    )
    loss = batch_loss(loss_inputs(one, microbatch, scores, prepared.counts), config).loss
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


def make_trl(model: Qwen2ForCausalLM, folder: str) -> Any:
    """TRL's trainer around a copy of the model; what a case changes is set on it as an attribute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
            pad_token="<pad>",
            eos_token="<eos>",
        )
        args = GRPOConfig(
            folder, per_device_train_batch_size=len(LENGTHS), num_generations=4, temperature=TEMPERATURE, beta=0.0,
            max_completion_length=LONGEST, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        )  # fmt: skip
        rows = Dataset.from_dict({"prompt": ["w2"] * len(LENGTHS)})
        trainer: Any = GRPOTrainer(
            copy.deepcopy(model), lambda completions, **_: [0.0] * len(completions), args, rows,
            processing_class=tokenizer,
        )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def trls_correction(data: Data, mode: str, cap: float) -> Tensor:
    """As `_generate_and_score_completions` computes it, which also generates, so it can't be called."""
    log_BC = (data.old_BC - data.roll_BC) * data.mask_BC
    ratio = torch.exp(log_BC.sum(-1, keepdim=True) if mode.startswith("sequence") else log_BC)
    if mode.endswith("truncate"):
        return ratio.clamp(max=cap)
    return ratio.masked_fill((ratio < 1 / cap) | (ratio > cap), 0.0)


def theirs(trainer: Any, data: Data, case: Case) -> tuple[float, list[Tensor]]:
    """Loss and gradients in TRL."""
    start = {"importance_sampling_level": "token", "beta": 0.0, "use_vllm": False, "_entropy_bonus_enabled": False}
    for name, value in {**CLIP, **start, **case.trl}.items():
        setattr(trainer, name, value)
    gate = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    for name, value in {"delta": None, "use_bias_correction_kl": False, **gate, **case.args}.items():
        setattr(trainer.args, name, value)
    inputs = {
        "prompt_ids": data.prompt_BP,
        "prompt_mask": torch.ones_like(data.prompt_BP),
        "completion_ids": data.completion_BC,
        "completion_mask": data.mask_BC,
        "advantages": data.advantages_B,
        "old_per_token_logps": data.old_BC,
        "ref_per_token_logps": data.ref_BC,
        "num_items_in_batch": data.mask_BC.sum(),
    }
    if trainer.use_vllm:
        inputs["importance_sampling_ratio"] = trls_correction(
            data, trainer.vllm_importance_sampling_mode, case.ours["is_cap"]
        )
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss.item(), list(torch.autograd.grad(loss, list(trainer.model.parameters())))


def main() -> None:
    try:
        import trl
    except ImportError:
        sys.exit("TRL is not installed: pip install --no-deps trl==1.16.0, and accelerate and datasets")
    model = make_model()
    data = make_data(model)
    worst = 0.0
    print(f"TRL {trl.__version__}\n{'case':32} {'loss':>11} {'TRL':>11} {'|difference|':>13} {'of gradient':>12}")
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trl(model, folder)
        for case in CASES:
            (loss, slopes), (their_loss, their_slopes) = ours(model, data, case.ours), theirs(trainer, data, case)
            size = max(float(slope.abs().max()) for slope in their_slopes)
            off = max(float((a - b).abs().max()) for a, b in zip(slopes, their_slopes, strict=True)) / size
            worst = max(worst, abs(loss - their_loss), off)
            print(f"{case.name:32} {loss:11.6f} {their_loss:11.6f} {abs(loss - their_loss):13.1e} {off:12.1e}")
    if worst > TOLERANCE:
        sys.exit(f"differs by {worst:.1e}, wanted at most {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
