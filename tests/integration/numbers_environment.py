"""Word problems whose reward is 1 for an answer that has a digit.

Few answers of the untrained model are right, so a small batch of them would often teach nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from environments.peers.inference import Completion
from environments.word_problems import WordProblem, WordProblemsEnv


class NumbersEnv(WordProblemsEnv):
    """Word problems that want any number."""

    name = "numbers"

    async def score_group(self, item: WordProblem, completions: Sequence[Completion]) -> list[float]:
        return [float(any(map(str.isdigit, self.decode(completion)))) for completion in completions]


if __name__ == "__main__":
    NumbersEnv.cli()
