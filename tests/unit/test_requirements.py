"""What is asked of a server that was started apart from the trainer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from grpo_trainer.engine.head import ExactHead
from grpo_trainer.weights.bridge import problems_of
from tests.unit.test_proof import INFO
from tests.unit.tiny_lora import tiny_qwen


@pytest.mark.parametrize(
    ("dtype", "servers", "rounds", "warned"),
    [
        ("bfloat16", "float32", True, ("float32", "bfloat16", "model")),
        ("bfloat16", "bfloat16", False, ("bfloat16", "float32", "float32")),
        ("bfloat16", "bfloat16", True, None),
        ("bfloat16", "float32", False, None),
        ("float32", "float32", True, None),
        ("bfloat16", None, True, None),  # a server that does not say
    ],
)
def test_logits_that_one_side_rounds_are_told(
    dtype: str, servers: str | None, rounds: bool, warned: tuple[str, ...] | None, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = tiny_qwen()
    model.to(torch.bfloat16)
    if not rounds:
        model.lm_head.__class__ = ExactHead
    info = msgspec.structs.replace(INFO, logits_dtype=servers, dtype=dtype)
    assert problems_of(info, INFO.max_model_len, model=model) == []
    assert [record.args for record in caplog.records] == ([warned] if warned else [])  # server's, trainer's, wanted
    caplog.clear()
    assert problems_of(info, 10**6, model=model, warns=False) == [] and not caplog.text  # another process warns
    assert problems_of(info, INFO.max_model_len) == [] and not caplog.text  # of a server that the trainer has started
