"""GPU tests skip, with the reason, where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from grpo_trainer.engine.allocator import grow_segments


@pytest.fixture(scope="session", autouse=True)  # before a module starts a server
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    grow_segments()  # as in a trainer
