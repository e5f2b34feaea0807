"""What `grpo doctor` says of settings with which samples and trainer have two distributions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_trainer.bench.models import SHAPES
from grpo_trainer.config.run import build_run
from grpo_trainer.doctor.run_checks import check_distribution

DENSE = SHAPES["tiny"]
MIXTURE = replace(DENSE, experts=8, active_experts=2)


@pytest.mark.parametrize(
    ("flags", "shape", "fix"),
    [
        ({}, DENSE, ""),
        ({}, None, ""),
        ({}, MIXTURE, "--routing-replay server"),
        ({"routing_replay": "server"}, MIXTURE, ""),
        ({"server.quantization": "fp8"}, DENSE, ""),  # corrected by default
        ({"server.kv_cache_dtype": "fp8", "ratio_against": "rollout"}, DENSE, "--ratio-against trainer"),
        ({"load_in_4bit": True}, DENSE, "--ratio-against trainer"),
        ({"load_in_4bit": True, "ratio_against": "trainer"}, DENSE, ""),
        ({"server.extra_args": "--logprobs-mode,raw_logprobs"}, DENSE, "leave --logprobs-mode out"),
        ({"server.extra_args": "--generation-config=auto"}, DENSE, "leave --generation-config out"),
        ({"server.extra_args": "--generation-config,vllm"}, DENSE, ""),
    ],
)
def test_what_bends_it_is_named_with_what_helps(flags: dict[str, Any], shape: Any, fix: str) -> None:
    config = build_run({}, {"model_name": "m", "weight_bridge_mode": "lora_only", **flags})
    found = check_distribution(config, shape)
    assert found.status == ("warn" if fix else "ok")
    assert fix in found.fix
