"""Passes of a model that no process can make alone, because each has a part of the weights.

The order of a step announces the step's passes. For other passes of rank 0 (the bridge's proof, logged samples, a
checkpoint's weights), rank 0 sends separate orders, unless all processes are within common work already.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grpo_trainer.batch.microbatches import MicroBatch
from grpo_trainer.engine.forward import Forward, evaluating
from grpo_trainer.engine.logprobs import TokenScores
from grpo_trainer.model.export import stored_tensors
from grpo_trainer.parallel.strategy import ParallelStrategy
from grpo_trainer.parallel.world import Collect, Command, ModelPass, Score, World


class CommonPasses(ParallelStrategy):
    """A model whose passes all processes make together.

    Args:
        forward: the forward pass of the model; its `scores` do not announce themselves.

    Attributes:
        forward: the same, but rank 0 announces its passes outside steps.
    """

    whole = False

    def __init__(self, world: World, forward: Forward) -> None:
        self._world = world
        self._model = forward.model
        self._announced = False
        self.forward = _Together(forward, self)
        if world.leads:
            self._model.register_forward_pre_hook(self._announce_pass, prepend=True, with_kwargs=True)
            self._model.register_forward_hook(self._end_pass)

    @abstractmethod
    def _scores(self, microbatch: MicroBatch, *, entropy_gradient: bool = False) -> TokenScores:
        """Compute scores; all processes call this."""

    @abstractmethod
    def _gathered(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole tensor of the model; all processes call this."""

    def mean(self, value: float, weight: float) -> float:
        said = self._world.gather((value, weight))
        return sum(each * share for each, share in said) / sum(share for _, share in said)

    @contextmanager
    def together(self, order: Callable[[], Command]) -> Iterator[None]:
        """Enter the context of a computation of all processes. Outside steps, rank 0 sends the others its order."""
        if self._world.is_working:
            yield
            return
        if self._world.leads:
            self._world.give_all(order())
        with self._world.working():
            yield

    def _announce_pass(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._world.is_working:
            assert not args and kwargs.keys() == {"input_ids", "use_cache"} and not kwargs["use_cache"]
            self._world.give_all(ModelPass(kwargs["input_ids"].cpu()))
            self._world.begin()
            self._announced = True

    def _end_pass(self, *_: Any) -> None:
        """End a pass that `_announce_pass` began; torch does not call this after a failed pass."""
        if self._announced:
            self._announced = False
            self._world.end()

    def scores(self, microbatch: MicroBatch, *, entropy_gradient: bool) -> TokenScores:
        """Compute `Forward.scores` with all processes."""
        with self.together(lambda: Score(microbatch.to(torch.device("cpu")))):
            return self._scores(microbatch, entropy_gradient=entropy_gradient)

    def tensors(self, keep: Callable[[Tensor], Tensor] = Tensor.cpu) -> dict[str, Tensor]:
        """Gather a checkpoint's whole tensors, one at a time, and return what rank 0 keeps of each.

        Args:
            keep: returns a copy of a gathered tensor, whose memory the next one needs.
        """
        found: dict[str, Tensor] = {}
        with self.together(Collect):
            for name, (_, tensor) in stored_tensors(self._model).items():  # type: ignore[arg-type]
                whole = self._gathered(name, tensor)
                if self._world.leads:
                    found[name] = keep(whole.detach())
        return found

    def follow(self, order: ModelPass | Score) -> None:
        """Take part in a pass that rank 0 has announced."""
        device = next(self._model.parameters()).device
        with torch.no_grad():
            match order:
                case ModelPass(tokens_BT):
                    with evaluating(self._model):
                        self._model(input_ids=tokens_BT.to(device), use_cache=False)
                case Score(microbatch):
                    self._scores(microbatch.to(device))


class _Together(Forward):
    """A forward pass that all processes make together."""

    def __init__(self, forward: Forward, passes: CommonPasses) -> None:
        vars(self).update(vars(forward))
        self._passes = passes

    def scores(self, microbatch: MicroBatch, *, entropy_gradient: bool = False) -> TokenScores:
        return self._passes.scores(microbatch, entropy_gradient=entropy_gradient)
