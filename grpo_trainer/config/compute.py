"""Options of how a step is computed: none of them changes what is learnt. Imports no torch."""

from __future__ import annotations

from typing import Literal

from grpo_trainer.config.options import Section, option

Choice = Literal["auto", "on", "off"]

SPARE = 0.04
"""Of a GPU's free memory, what is left to the allocator's gaps and libraries' workspaces."""


class ComputeConfig(Section):
    """Speed and memory."""

    max_tokens_per_microbatch: int | None = option(
        None,
        help="Token limit of a forward pass, padding included. If set, it decides how the sequences of a step "
        "are split into microbatches (default: --batch-size sequences each).",
        gt=1,
    )
    overlong: Literal["truncate", "drop"] = option(
        "truncate", help="Sequences longer than --seq-len: train on the part that fits, or drop them; both are counted."
    )
    packing: Choice = option(
        "auto", help="Concatenate sequences without padding; auto: on a GPU, if the model's attention allows it."
    )
    share_prompts: Choice = option(
        "auto",
        help="Compute a prompt once for all sequences of a microbatch that begin with it; auto: if sequences "
        "are packed.",
    )
    compile: Choice = option(
        "auto",
        help="torch.compile for decoder layers and head; auto: on a GPU, for models of at least 0.3B "
        "parameters and runs of at least 20 steps (compiling takes about a minute), but not for a "
        "tensor-parallel server's weights.",
    )
    trainer_memory_gb: float | None = option(
        None,
        help="GPU memory in GB for the plan of what to recompute, if --gradient-checkpointing is not set (default: the "
        "free memory).",
        gt=0,
    )
    grad_dtype: Literal["weights", "float32"] = option(
        "weights",
        help="Dtype in which gradients accumulate over microbatches. weights: that of the weights, whose sum over 64 "
        "microbatches has a random error of 1 % in bfloat16.",
    )
