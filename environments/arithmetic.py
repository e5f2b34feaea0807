"""The arithmetic task: problems, prompts, answers and the reward, as pure functions.

The task needs no data set and its reward is verifiable, so a whole training run works on a machine without a network. A
fixed split divides the problems into a training and an evaluation part.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from operator import add, mul, sub
from typing import Literal

Operation = Literal["+", "-", "*"]

_COMPUTE: dict[Operation, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
# The split is a constant of the task and not of a run: a problem that any run trains on is never held out in another.
_SPLIT_SEED = 20240203


@dataclass(frozen=True, slots=True)
class Problem:
    """One exercise, such as ``12+34=``."""

    left: int
    right: int
    operation: Operation = "+"

    @property
    def prompt(self) -> str:
        """Return the model's prompt: ``12+34=``."""
        return f"{self.left}{self.operation}{self.right}="

    @property
    def answer(self) -> str:
        """Return the text that the model should write before it ends its turn: ``46``."""
        return str(_COMPUTE[self.operation](self.left, self.right))


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """All problems of one operand range and operation, in two disjoint parts."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]

    @classmethod
    def of(cls, low: int, high: int, operation: Operation = "+", held_out_share: float = 0.1) -> "ProblemSet":
        """Return every pair of operands in ``[low, high]``, with a fixed pseudo-random share held out.

        Raises:
            ValueError: The range is empty, or too small to leave a problem in each part.
        """
        if low > high:
            raise ValueError(f"low {low} is above high {high}")
        operands = range(low, high + 1)
        problems = [Problem(left, right, operation) for left in operands for right in operands]
        random.Random(_SPLIT_SEED).shuffle(problems)
        cut = round(len(problems) * held_out_share)
        if not 0 < cut < len(problems):
            raise ValueError(
                f"{low} to {high} gives {len(problems)} problems, too few for a training part and a held-out share of "
                f"{held_out_share}"
            )
        return cls(train=tuple(problems[cut:]), held_out=tuple(problems[:cut]))


def reward(problem: Problem, completion: str) -> float:
    """Return 1.0 if the completion is exactly the answer (apart from surrounding white space), else 0.0."""
    return float(completion.strip() == problem.answer)
