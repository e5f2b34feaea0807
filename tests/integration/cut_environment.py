"""Sums whose answers are sampled with everything that leaves tokens out."""

from __future__ import annotations

from dataclasses import replace

from environments.arithmetic_server import ArithmeticEnv
from environments.peers.inference import Sampling


class CutEnv(ArithmeticEnv):
    """Sums, sampled with top-p, top-k, min-p and a temperature."""

    name = "cut"

    def sampling(self, room: int) -> Sampling:
        """Return sampling from few of the tokens."""
        return replace(super().sampling(room), top_p=0.9, top_k=8, min_p=0.02, temperature=0.7)


if __name__ == "__main__":
    CutEnv.cli()
