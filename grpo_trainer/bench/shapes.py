"""Models of the benchmarks: Qwen2's own configurations. The values of weights do not affect speed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from grpo_trainer.config.options import Section, option
from grpo_trainer.doctor.model import ModelShape

ShapeName = Literal["tiny", "0.5b", "1.5b", "7b", "14b", "32b"]
POSITIONS = 32_768
SHAPE_HELP = "Shape of the model; its weights are random."
CACHE_BYTES_TINY = 64 << 20
"""Size of vLLM's KV cache for the shape `tiny` on a CPU; the default would be gigabytes."""


class ModelChoice(Section):
    """Model."""

    shape: ShapeName = option("0.5b", help=SHAPE_HELP)
    model_dir: Path | None = option(
        None, help="Folder of the model, which is written if it does not exist (default: a temporary folder)."
    )


def qwen2(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool
) -> ModelShape:
    """Return the shape of a model as Qwen2 has it."""
    return ModelShape(
        *(hidden, intermediate, layers, heads, kv_heads),
        head_dim=hidden // heads,
        vocab=vocab,
        tied=tied,
        biases=True,
        positions=POSITIONS,
    )


SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "tiny": qwen2(64, 128, 2, 2, 1, 98, tied=False),  # heads of 32: vLLM on a CPU has no smaller ones
        "0.5b": qwen2(896, 4864, 24, 14, 2, 151_936, tied=True),
        "1.5b": qwen2(1536, 8960, 28, 12, 2, 151_936, tied=True),
        "7b": qwen2(3584, 18_944, 28, 28, 4, 152_064, tied=False),
        "14b": qwen2(5120, 13_824, 48, 40, 8, 152_064, tied=False),
        "32b": qwen2(5120, 27_648, 64, 40, 8, 152_064, tied=False),
    }
)
