"""All weights as they are sent: the names, shapes and bits of a checkpoint that transformers writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from grpo_trainer.model.export import stored_tensors
from grpo_trainer.weights.buckets import Buckets
from tests.golden.models import CONFIGS, random_model

LIMIT = 40_000
"""Bytes: small models travel in several buckets."""


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_buckets_together_are_the_checkpoint(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = random_model(architecture)
    stored = {name: tensor for name, (_, tensor) in stored_tensors(model).items()}
    buckets = Buckets(model, stored, dtype, LIMIT)
    assert len(buckets) > 1
    sent: dict[str, torch.Tensor] = {}
    buffer_E = torch.empty(buckets.largest, dtype=dtype)
    for number, header in enumerate(buckets.headers):
        data = buckets.pack(number, stored, buffer_E).view(torch.uint8).numpy().tobytes()
        found = load(header + data)
        assert not set(found) & set(sent)
        sent |= found
    assert buckets.nbytes == sum(tensor.nbytes for tensor in sent.values())
    model.to(dtype).save_pretrained(tmp_path)  # pyright: ignore[reportArgumentType, reportCallIssue]
    wanted = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert sorted(sent) == sorted(wanted)
    assert all(sent[name].dtype == dtype and torch.equal(sent[name], wanted[name]) for name in wanted)


def test_a_bucket_has_the_weights_of_now() -> None:
    model = random_model(sorted(CONFIGS)[0])
    stored = {name: tensor for name, (_, tensor) in stored_tensors(model).items()}
    buckets = Buckets(model, stored, torch.float32)
    buffer_E = torch.empty(buckets.largest)
    before = buckets.pack(0, stored, buffer_E).clone()
    with torch.no_grad():
        next(iter(stored.values())).add_(1.0)
    changed = buckets.pack(0, stored, buffer_E) != before
    assert int(changed.sum()) == next(iter(stored.values())).numel()
