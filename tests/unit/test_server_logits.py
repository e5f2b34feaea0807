"""Which dtype a server's logits have: `--logits-dtype`, vLLM's own `--hf-overrides`, and the device."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from vllm_server import arguments, compat


@pytest.mark.parametrize(
    ("device", "asked", "given", "invariant", "head"),
    [
        ("cpu", "auto", {}, "0", None),
        ("cuda", "auto", {}, "0", "float32"),
        ("cpu", "float32", {"rope_theta": 1e4}, "0", "float32"),
        ("cuda", "model", {}, "0", None),
        ("cuda", "auto", {"head_dtype": "bfloat16"}, "0", "bfloat16"),
        ("cuda", "auto", {}, "1", None),
    ],
)
def test_logits_dtype_is_that_of_vllms_head(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: str, given: dict[str, object], invariant: str, head: str | None
) -> None:
    monkeypatch.setattr(compat, "device_type", lambda: device)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    args = Namespace(model="none", logits_dtype=asked, hf_overrides=given)
    arguments._plan_logits(args)
    assert args.hf_overrides == given | ({} if head is None else {"head_dtype": head})


@pytest.mark.parametrize(
    ("given", "head", "text"),
    [
        ({}, "float32", {"head_dtype": "float32"}),
        ({"head_dtype": "bfloat16"}, "bfloat16", {"head_dtype": "bfloat16"}),
        ({"text_config": {"rope_theta": 1e4}}, "float32", {"head_dtype": "float32", "rope_theta": 1e4}),
    ],
)
def test_logits_dtype_is_that_of_a_conditional_models_text_part(
    tmp_path: Path, given: dict[str, Any], head: str, text: dict[str, Any]
) -> None:
    """vLLM builds that part from its own configuration."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"model_type": "gemma3_text"}}))
    args = Namespace(model=str(tmp_path), logits_dtype="float32", hf_overrides=given)
    arguments._plan_logits(args)
    assert args.hf_overrides == {"head_dtype": head, "text_config": text}
