"""A model of which each trainer process has a shard of every matrix, as vLLM's workers have (tensor parallel).

    q, k, v, gate, up          some rows: this process's heads, this process's part of the MLP
    o, down                    the columns for them; results are summed over the processes, biases added once
    embed_tokens, lm_head      some rows: this process's part of the vocabulary
    all other parameters       whole, the same in all processes

`cut_model` turns a model into this process's shard, with or without weights. Its layers then compute with the other
processes (`collectives.py`); everything between the layers is the same in all processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from grpo_common.errors import Problem
from grpo_common.sharing import indivisible, padded_vocabulary
from grpo_trainer.engine.collectives import join, peers, spread
from grpo_trainer.engine.head import ShardedHead
from grpo_trainer.errors import ModelError

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")
_SHARD = "grpo_shard"
"""A cut model's attribute with its `ModelShard`."""
NORMS_OF_HEADS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut along a dimension."""

    dim: int
    size: int  # along it, in all processes together
    each: int  # of each process's part; the last parts may be shorter

    def own(self, rank: int) -> range:
        return range(min(rank * self.each, self.size), min((rank + 1) * self.each, self.size))


@dataclass(frozen=True)
class ModelShard:
    """What a process has of a model's parameters."""

    rank: int
    ranks: int
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """Parameters of which it has a part, by each of their names; it has all of the others."""
    partial: frozenset[str] = frozenset()
    """Whole parameters whose gradient is computed in parts, by each process for its heads."""

    @property
    def padded(self) -> dict[str, int]:
        """Return the rows of vocabularies' shards in vLLM, which pads them, by name."""
        return {name: cut.each for name, cut in self.cuts.items() if name.split(".")[-2] in VOCABULARY}

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return a view of this process's part of a whole tensor of the parameter's shape."""
        return whole if (cut := self.cuts.get(name)) is None else _part(whole, cut, self.rank)

    def gathered(self, name: str, own: Tensor) -> Tensor:
        """Return the whole tensor, of the parts that all processes have; all of them call this.

        Raises:
            PeerGoneError: one of them has ended.
        """
        if (cut := self.cuts.get(name)) is None:
            return own
        parts = []
        for rank in range(self.ranks):
            shape = [*own.shape]
            shape[cut.dim] = len(cut.own(rank))
            parts.append(own.contiguous() if rank == self.rank else own.new_empty(shape))
            with peers():
                dist.broadcast(parts[-1], rank)
        return torch.cat(parts, cut.dim)

    def whole_shape(self, name: str, own: Tensor) -> torch.Size:
        shape = [*own.shape]
        if (cut := self.cuts.get(name)) is not None:
            shape[cut.dim] = cut.size
        return torch.Size(shape)


class RowsOfVocabulary(nn.Embedding):
    """An embedding with the rows of some tokens."""

    first: int  # of these tokens

    def forward(self, input: Tensor) -> Tensor:
        own = input - self.first
        outside = (own < 0) | (own >= len(self.weight))
        rows = functional.embedding(own.masked_fill(outside, 0), self.weight, self.padding_idx)
        return join(rows.masked_fill(outside[..., None], 0.0))


class Columns(nn.Linear):
    """A linear layer with the columns for some inputs."""

    def forward(self, input: Tensor) -> Tensor:
        result = join(functional.linear(input, self.weight))
        return result if self.bias is None else result + self.bias


def cut_model(model: PreTrainedModel, rank: int, ranks: int) -> ModelShard:
    """Turn a model into the shard of one of several processes, and return what it has.

    Parameters are replaced by this process's parts: copies, or tensors on `meta` if they were there.

    Raises:
        ModelError: vLLM's shards of this architecture are not known, or its sizes can't be divided.
    """
    config: Any = model.config.get_text_config()
    problems = [*indivisible(config.to_dict(), ranks), *_unknown(model, config)]
    if problems:
        why = "the trainer does not know how vLLM shards this model"
        fix = "use --server.tensor-parallel-size 1, or --weight-bridge-mode broadcast, lora_only or none"
        raise ModelError.of(
            [
                replace(each, field=f"--model-name: {each.field}", fix=each.fix or fix, summary=each.summary or why)
                for each in problems
            ]
        )
    cuts: dict[str, Cut] = {}
    partial: set[str] = set()
    made: dict[int, nn.Parameter] = {}  # a tied parameter is cut once
    sharded = {path.rpartition(".")[0] for path, _ in model.named_modules() if _leaf(path) in BY_ROWS}
    for path, module in [*model.named_modules()]:
        for leaf, whole in [*module.named_parameters(recurse=False)]:
            if (cut := _cut_of(path, leaf, whole, ranks)) is not None:
                cuts[f"{path}.{leaf}"] = cut
                part = _part(whole.detach(), cut, rank).clone(memory_format=torch.contiguous_format)
                own = nn.Parameter(part, requires_grad=whole.requires_grad)
                module.register_parameter(leaf, made.setdefault(id(whole), own))
            elif _leaf(path) in NORMS_OF_HEADS:
                partial.add(f"{path}.{leaf}")
        _adapt(path, module, cuts, rank)
    for path in sharded:
        model.get_submodule(path).register_forward_pre_hook(_spread_input, with_kwargs=True)
    shard = ModelShard(rank, ranks, cuts, frozenset(partial))
    vars(model)[_SHARD] = shard
    return shard


def shard_of(model: nn.Module) -> ModelShard | None:
    """Return what this process has of a model's parameters; None: all."""
    return vars(model).get(_SHARD)


def _unknown(model: PreTrainedModel, config: Any) -> Iterator[Problem]:
    """Yield parameters of which it is not known how vLLM shards them."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for path, module in model.named_modules():
        name = _leaf(path)
        in_attention = ".self_attn." in path and name not in (*BY_ROWS, *BY_COLUMNS)
        for leaf, parameter in module.named_parameters(recurse=False):
            shown = f"{path}.{leaf}"
            if parameter.ndim > 1 and (
                name not in (*BY_ROWS, *BY_COLUMNS, *VOCABULARY) or type(module) not in (nn.Linear, nn.Embedding)
            ):
                yield Problem(shown, f"a {type(module).__name__}", "a linear layer or embedding of a known name")
            elif in_attention and not (name in NORMS_OF_HEADS and parameter.shape == (size,)):
                yield Problem(shown, str(list(parameter.shape)), f"q_norm and k_norm of a head's size, {size}, alone")


def _cut_of(path: str, leaf: str, whole: Tensor, ranks: int) -> Cut | None:
    name = _leaf(path)
    if name in BY_ROWS:
        return Cut(0, len(whole), len(whole) // ranks)
    if name in BY_COLUMNS and leaf == "weight":
        return Cut(1, whole.shape[1], whole.shape[1] // ranks)
    if name in VOCABULARY:
        return Cut(0, len(whole), padded_vocabulary(len(whole)) // ranks)
    return None


def _part(whole: Tensor, cut: Cut, rank: int) -> Tensor:
    own = cut.own(rank)
    return whole.narrow(cut.dim, own.start, len(own))


def _adapt(path: str, module: nn.Module, cuts: Mapping[str, Cut], rank: int) -> None:
    """Make a layer compute with its part."""
    if _leaf(path) in BY_COLUMNS:
        module.__class__ = Columns
    if _leaf(path) not in VOCABULARY:
        return
    cut = cuts[f"{path}.weight"]
    own = cut.own(rank)
    if isinstance(module, nn.Embedding):
        padding = module.padding_idx
        module.__class__ = RowsOfVocabulary
        module.first, module.num_embeddings = own.start, len(own)  # type: ignore[assignment]
        module.padding_idx = None if padding is None or padding not in own else padding - own.start
    else:
        module.__class__ = ShardedHead
        module.own, module.each = own, cut.each  # type: ignore[assignment]


def _spread_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    if args:
        return (spread(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": spread(kwargs["hidden_states"])}


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]
