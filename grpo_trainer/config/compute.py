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
        help="Most tokens of a forward pass, padding included; then it decides how a step's sequences (--batch-size x "
        "--gradient-accumulation-steps) are cut into microbatches (default: --batch-size of them each).",
        gt=1,
    )
    overlong: Literal["truncate", "drop"] = option(
        "truncate", help="Sequences longer than --seq-len: train on what fits, or not at all; both are counted."
    )
    packing: Choice = option(
        "auto", help="Sequences end to end without padding; auto: on a GPU, where the model's attention allows it."
    )
    share_prompts: Choice = option(
        "auto",
        help="A prompt that several sequences of a microbatch begin with is computed once for all of them; auto: where "
        "sequences are packed.",
    )
    compile: Choice = option(
        "auto",
        help="torch.compile of decoder layers and head; auto: on a GPU, for models of at least 0.3B parameters and "
        "runs of at least 20 steps (it takes about a minute), not for weights that are cut over several GPUs.",
    )
    activation_offload: bool = option(
        False, help="Keep what layers are recomputed from in main memory; turns --gradient-checkpointing on."
    )
    trainer_memory_gb: float | None = option(
        None,
        help="GPU memory in GB that --gradient-checkpointing auto may count on (default: what is free).",
        gt=0,
    )
    grad_dtype: Literal["weights", "float32"] = option(
        "weights",
        help="Gradients add up over microbatches in the weights' dtype, or in float32: in bfloat16, 64 microbatches "
        "leave a random error of 1 % of the sum.",
    )
