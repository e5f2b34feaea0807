"""A shard of every matrix in each process, as in the workers of a server with tensor parallel.

All processes train on the same batch, each with its part of every layer (`engine/tensor_shards.py`). So losses and
logprobs are the same in all, the gradient of a shard is complete where it is, and each process has the optimizer states
of its shards. Parameters that all processes have whole (norms) get the same gradient in all of them. Rank 0 alone
rounds their new values, and sends them to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from grpo_trainer.engine.forward import Forward
from grpo_trainer.engine.tensor_shards import ModelShard
from grpo_trainer.optim.eight_bits import SCALE, SIGNED, decoded, encoded, levels_of
from grpo_trainer.optim.steps import sampled
from grpo_trainer.parallel.shard_states import Part, States
from grpo_trainer.parallel.strategy import Divided, names_in
from grpo_trainer.parallel.world import World, in_buckets


class TensorShards(Divided):
    """This process's shard.

    Args:
        forward: the forward pass of a model that `cut_model` has cut.
        trained: the model's trained parameters, in the model's order; their memory may be another process's.
        shard: what this process has.
    """

    in_two_parts = True
    same_batch = True

    def __init__(self, world: World, forward: Forward, trained: Sequence[Parameter], shard: ModelShard) -> None:
        super().__init__(world, forward)
        self._prepared = False  # the gradients' memory has new weights that are not written yet
        self._shard = shard
        self.parameters = self.written = list(trained)
        self.names = names_in(self._model, self.parameters)
        pairs = list(zip(self.names, self.parameters, strict=True))
        self._everywhere = [parameter for name, parameter in pairs if name not in shard.cuts]
        self._partial = [parameter for name, parameter in pairs if name in shard.partial]
        self._counted = [parameter for name, parameter in pairs if world.leads or name in shard.cuts]

    def _gathered(self, name: str, tensor: Tensor) -> Tensor:
        own = tensor if tensor.grad is None or not self._prepared else tensor.grad.to(tensor.dtype)
        return self._shard.gathered(name, own.detach())

    # ------------------------------------------------------------------------------------------ steps

    def finish_gradients(self) -> None:
        """Sum the gradients of norms of heads, of which each process computes a part for its heads."""
        self._world.sum_gradients(self._partial)

    def clip(self, limit: float) -> float:
        """Clip by the norm of all shards' gradients; parameters that all processes have count once."""
        return self._world.clip(self.parameters, limit, self._counted)

    @torch.no_grad()
    def share_update(self) -> None:
        """Send rank 0's new values of parameters that all processes have."""
        in_buckets([p.grad for p in self._everywhere if p.grad is not None], lambda flat: dist.broadcast(flat, 0))
        self._prepared = True

    def finish_update(self) -> None:
        self._prepared = False

    def check(self, samples: Sequence[Tensor]) -> None:
        """Check the parameters that all processes have."""
        if self._everywhere:
            self._world.check_agreement(sampled(self._everywhere))

    # ------------------------------------------------------------------------------------------ checkpoints

    def states(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's `state_dict` as one process with all weights has it, in rank 0's main memory.

        All processes call it; the other ranks return no states. States in 8 bits are encoded again, in blocks of the
        whole tensors.
        """
        found: States = {}
        for number, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            state = dict(optimizer.state.get(parameter, {}))
            whole = _changed(state, parameter.shape, lambda own, name=name: self._shard.gathered(name, own))
            if self._world.leads and whole:
                found[number] = {key: v.cpu() if isinstance(v, Tensor) else v for key, v in whole.items()}
        return {**optimizer.state_dict(), "state": found}

    def own_states(self, whole: States) -> States:
        """Return this process's part of the states that one process with all weights has."""
        found: States = {}
        for number, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            shape = self._shard.whole_shape(name, parameter)
            own = _changed(whole.get(number, {}), shape, lambda value, name=name: self._shard.own(name, value).clone())
            if own:
                found[number] = own
        return found

    def whole_parts(self) -> list[Part]:
        """Return parts of whole parameters, to read states that several processes have written in other parts."""
        parts = []
        for number, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            whole = nn.Parameter(torch.empty(self._shard.whole_shape(name, parameter), dtype=parameter.dtype))
            parts.append(Part(name, number, whole, whole))
        return parts

    def save_states(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: rank 0 has gathered the states (`states`) and writes them with the rest."""


def _changed(state: dict[str, Any], shape: Sequence[int], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return a parameter's states with those of its shape changed, for example cut."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key + SCALE in state:
            levels, midpoints = levels_of(SIGNED[key], value.device)
            new = change(decoded(value, state[key + SCALE], levels).view(*shape))
            found[key], found[key + SCALE] = encoded(new.reshape(-1), midpoints)
        elif not key.endswith(SCALE):
            found[key] = change(value) if isinstance(value, Tensor) and value.ndim else value
    return found
