"""Which options of vLLM a server can't have if a trainer writes its weights, for who starts it and for the server."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from grpo_common.errors import Problem

VOCABULARY_PADDING = 64
"""vLLM's `DEFAULT_VOCAB_PADDING_SIZE`: it pads a vocabulary to a multiple of this, and cuts it into equal parts."""

_ONLY: tuple[tuple[str, object, str, str], ...] = (
    ("pipeline_parallel_size", 1, "each GPU would hold some layers", "serve on one GPU"),
    ("data_parallel_size", 1, "each replica would hold its own weights", "serve on one GPU"),
    ("enable_sleep_mode", False, "the memory could be taken away from under the trainer", "leave it out"),
    ("cpu_offload_gb", 0, "the weights would lie in two places", "leave it out"),
    ("kv_transfer_config", None, "caches outside of the engine outlive an update of the weights", "leave it out"),
    ("quantization", None, "quantised weights cannot be trained", "leave it out"),
)
"""Options by the names that argparse gives them: the only value that works, why, and the fix."""


_RECEIVABLE = ("pipeline_parallel_size",)
"""Those that a server may have that is sent all weights: each worker takes its part."""


def unreceivable(options: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem for each option with which no trainer could send the server weights, as `unshareable` does."""
    for each in unshareable(options):
        if each.field == "data_parallel_size":
            yield replace(each, fix="start a server for each replica: --server.replicas")
        elif each.field not in _RECEIVABLE:
            yield each
    if options.get("enable_lora"):
        yield Problem("enable_lora", "", "no LoRA, since the trainer sends whole weights", "leave it out")


def unshareable(options: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem, whose field is the option's name, for each option with which no trainer could use the weights.

    `options` has values by name, as argparse has them or as they were typed (`"2"`).
    """
    for name, only, why, fix in _ONLY:
        value = options.get(name, only)
        if value != only and str(value) != str(only):
            yield Problem(name, str(value), f"{'none' if only is None else only}, since {why}", fix)


def indivisible(config: Mapping[str, Any], workers: int) -> Iterator[Problem]:
    """Yield a problem for each size of a model (or its text part) that tensor parallel over `workers` can't divide.

    vLLM repeats heads of keys and values if it has more workers than heads. Then a weight has several places.
    """
    heads = config.get("num_attention_heads")
    sizes = {"num_attention_heads": heads, "num_key_value_heads": config.get("num_key_value_heads") or heads}
    for name, size in {**sizes, "intermediate_size": config.get("intermediate_size")}.items():
        if isinstance(size, int) and size % workers:
            wanted, why = f"a multiple of {workers}", "each worker holds an equal part of each layer"
            yield Problem(name, str(size), wanted, "choose another --server.tensor-parallel-size", why)


def padded_vocabulary(rows: int) -> int:
    """Return the number of rows of a vocabulary in vLLM."""
    return -(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING
