"""Shapes of the measured models: Qwen2's own configurations. The values of weights do not affect speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def adapter_parameters(self, rank: int) -> int:
        """Elements of a LoRA adapter on all linear modules: `rank * (in + out)` for each."""
        kv = self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + self.hidden) + 2 * (self.hidden + kv)  # q, o; k, v
        mlp = 3 * (self.hidden + self.intermediate)
        return rank * (attention + mlp) * self.layers

    def parameters(self) -> int:
        """Elements of the model, biases and norms included."""
        kv = self.kv_heads * self.head_dim
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv + self.hidden + 2 * kv
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return layer * self.layers + self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "tiny": Shape(64, 128, 2, 2, 1, 98, tied=False),  # heads of 32: vLLM on a CPU has no smaller ones
        "0.5b": Shape(896, 4864, 24, 14, 2, 151_936, tied=True),
        "1.5b": Shape(1536, 8960, 28, 12, 2, 151_936, tied=True),
        "7b": Shape(3584, 18_944, 28, 28, 4, 152_064, tied=False),
    }
)
