"""Writes the model: `python -m grpo_trainer.bench.loop.model SHAPE FOLDER`, a process that frees its GPU memory."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from grpo_trainer.bench.sync.random_model import ensure_model
from grpo_trainer.bench.sync.shapes import SHAPES
from grpo_trainer.errors import GrpoError

if __name__ == "__main__":
    try:
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        ensure_model(SHAPES[sys.argv[1]], Path(sys.argv[2]), dtype)
    except GrpoError as error:
        sys.exit(f"grpo: {error}")
