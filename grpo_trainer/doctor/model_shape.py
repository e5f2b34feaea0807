"""A model's sizes, from its config.json alone: enough to plan memory, without torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_trainer.errors import ModelError

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only model.

    Attributes:
        intermediate: width of the MLP, or of one expert.
        experts: experts in each layer; 0: a plain MLP.
        biases: whether q, k and v have one each, as Qwen2's.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    active_experts: int = 0
    biases: bool = False
    positions: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a config.json (of a model with several parts: its text model's).

        Raises:
            ModelError: a size is missing; its `got` names it.
        """
        text = {**config, **(config.get("text_config") or {})}
        hidden, heads = _first(text, "hidden_size", "n_embd"), _first(text, "num_attention_heads", "n_head")
        experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts", default=0)
        inner = _first(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        return cls(
            hidden=hidden,
            intermediate=(_first(text, "moe_intermediate_size", default=inner) if experts else inner),
            layers=_first(text, "num_hidden_layers", "n_layer"),
            heads=heads,
            kv_heads=_first(text, "num_key_value_heads", default=heads),
            head_dim=_first(text, "head_dim", default=hidden // heads),
            vocab=_first(text, "vocab_size"),
            tied=bool(text.get("tie_word_embeddings", True)),
            experts=experts,
            active_experts=_first(text, "num_experts_per_tok", default=0),
            biases=text.get("model_type") in ("qwen2", "qwen2_moe"),
            positions=_first(text, "max_position_embeddings", "n_positions", default=0) or None,
        )

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Elements of one decoder layer."""
        attention = 2 * self.hidden * self.q_width + 2 * self.hidden * self.kv_width
        biases = self.q_width + 2 * self.kv_width if self.biases else 0
        mlp = 3 * self.hidden * self.intermediate * max(self.experts, 1) + self.hidden * self.experts
        return attention + biases + mlp + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding and of the output layer, one where they are tied."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    @property
    def active_intermediate(self) -> int:
        """Width of the MLP that a token passes."""
        return self.intermediate * max(self.active_experts, 1)

    @property
    def module_widths(self) -> Mapping[str, tuple[int, int]]:
        """Inputs and outputs of a layer's linear modules."""
        return {
            "q_proj": (self.hidden, self.q_width),
            "k_proj": (self.hidden, self.kv_width),
            "v_proj": (self.hidden, self.kv_width),
            "o_proj": (self.q_width, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def adapter_parameters(self, rank: int, modules: tuple[str, ...], layers: int | None = None) -> int:
        """Elements of a LoRA adapter: `rank * (in + out)` for each module; of `layers` layers, all by default."""
        widths = [sum(widths) for name, widths in self.module_widths.items() if name in modules]
        return rank * sum(widths) * (self.layers if layers is None else layers)


def _first(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        if isinstance(value := config.get(name), int):
            return value
    if default is None:
        raise ModelError(field="config.json", got=f"no {names[0]}", wanted="a model's sizes")
    return default
