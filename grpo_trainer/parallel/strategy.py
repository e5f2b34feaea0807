"""The interface of the weights that a trainer process holds; `strategies.py` lists the ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.nn import Parameter

from grpo_trainer.engine.forward import Forward
from grpo_trainer.model.export import stored_tensors
from grpo_trainer.parallel.world import World


class ParallelStrategy(ABC):
    """The weights that a process holds.

    Attributes:
        parameters: the parameters that its optimizer updates.
        names: their names in the model.
        written: the parameters that a step changes in this process.
        forward: computes scores of tokens.
        loss_factor: factor of the loss before the backward pass.
        whole: whether this process can compute without the others.
        in_two_parts: whether the optimizer must prepare an update before it writes it.
        same_batch: whether all processes train on the whole batch, and not each on its share.
    """

    parameters: list[Parameter]
    names: list[str]
    written: list[Parameter]
    forward: Forward
    loss_factor: float = 1.0
    whole: bool = True
    in_two_parts: bool = False
    same_batch: bool = False

    def in_step(self) -> AbstractContextManager[None]:
        """Return the context within which all processes are in the same step."""
        return nullcontext()

    def passes(self, own: int) -> int:
        """Return the number of passes that each process must make; `own` is this process's. All processes call it."""
        return own

    @abstractmethod
    def finish_gradients(self) -> None:
        """Turn the parameters' gradients into those of the whole batch."""

    @abstractmethod
    def clip(self, limit: float) -> float:
        """Clip the norm of all gradients to `limit`, and return the norm before."""

    def share_update(self) -> None:  # noqa: B027  # nothing to exchange is the usual case
        """Exchange what the optimizer has prepared. All processes call it."""

    def finish_update(self) -> None:  # noqa: B027  # likewise
        """Write what the optimizer of this process does not write."""

    def check(self, samples: Sequence[Tensor]) -> None:  # noqa: B027  # shards differ
        """Raise a TrainingError if replicas differ."""

    def mean(self, value: float, weight: float) -> float:
        """Return the weighted mean over the processes. All processes call it."""
        return value


class Divided(ParallelStrategy):
    """Weights of which each process has a part, so that every pass of the model takes all processes."""

    whole = False

    def __init__(self, world: World, forward: Forward) -> None:
        self._world = world
        self._model = forward.model
        self.forward = forward

    @abstractmethod
    def _gathered(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole tensor of the model. All processes call it."""

    def mean(self, value: float, weight: float) -> float:
        said = self._world.gather((value, weight))
        return sum(each * share for each, share in said) / sum(share for _, share in said)

    def tensors(self, keep: Callable[[Tensor], Tensor] = Tensor.cpu) -> dict[str, Tensor]:
        """Gather a checkpoint's whole tensors, one at a time; return what rank 0 keeps of each. All processes call it.

        Args:
            keep: returns a copy of a gathered tensor, whose memory the next one needs.
        """
        found: dict[str, Tensor] = {}
        for name, (_, tensor) in stored_tensors(self._model).items():  # type: ignore[arg-type]
            whole = self._gathered(name, tensor)
            if self._world.leads:
                found[name] = keep(whole.detach())
        return found


def names_in(model: nn.Module, parameters: Sequence[Parameter]) -> list[str]:
    """Return the names of a model's parameters, each under its first name."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for parameter in parameters]
