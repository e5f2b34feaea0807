"""Decide which LoRA adapters vLLM serves, from PEFT's `adapter_config.json` alone.

Both sides use one table: the server refuses an adapter that it cannot serve, and the trainer refuses to start with it.
The table follows vLLM 0.32 (`vllm/lora/peft_helper.py`). It has the fields that vLLM refuses, and the fields
that vLLM ignores and would therefore serve wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from grpo_common.errors import Problem

SERVABLE: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "peft_type": (("LORA",), "train a LoRA adapter, or merge this one into the model"),
    "task_type": (("CAUSAL_LM", None), "train it on the model with its language head, not with a classification head"),
    "bias": (("none", None), "train with bias='none'"),
    "use_dora": ((False, None), "train with use_dora=False"),
    "lora_bias": ((False, None), "train with lora_bias=False"),
    "modules_to_save": ((None, []), "train without modules_to_save"),
    "alora_invocation_tokens": ((None, []), "train without activated LoRA"),
    "layer_replication": ((None, []), "train without layer_replication"),
    "target_parameters": ((None, []), "train target_modules only"),
    "use_qalora": ((False, None), "train with use_qalora=False"),
    "use_bdlora": ((None, {}), "train without block-diagonal LoRA"),
    "kasa_config": ((None, {}), "train without KaSA (it changes the base model)"),
    "arrow_config": ((None, {}), "train without Arrow routing"),
    "monteclora_config": ((None, {}), "train without MonteCLoRA"),
    "init_lora_weights": (
        (True, False, None, "gaussian", "eva", "orthogonal"),
        "convert it to a plain LoRA (this initialisation changes the base model)",
    ),
    "trainable_token_indices": ((None, []), "train without trainable tokens"),
    "alpha_pattern": ((None, {}), "train with one lora_alpha for all modules"),
    "rank_pattern": ((None, {}), "train with one rank for all modules"),
}
"""Maps a field of `adapter_config.json` to (its servable values, the fix for any other value)."""


def refusals(adapter_config: Mapping[str, Any], max_rank: int) -> list[Problem]:
    """Return everything in an adapter's configuration that cannot be served, the worst first; empty if it is servable.

    Args:
        adapter_config: the object in `adapter_config.json`; a missing field has a servable default.
        max_rank: the server's `--max-lora-rank`.
    """
    found = [
        Problem(
            field,
            got=json.dumps(adapter_config[field]),
            wanted=" or ".join(json.dumps(value) for value in servable),
            fix=fix,
        )
        for field, (servable, fix) in SERVABLE.items()
        if field in adapter_config and adapter_config[field] not in servable
    ]
    rank = adapter_config.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= max_rank:
        found.append(
            Problem(
                "r",
                got=str(rank),
                wanted=f"1 to {max_rank}, this server's --max-lora-rank",
                fix="train with a smaller rank or start the server with a larger --max-lora-rank",
            )
        )
    return found
