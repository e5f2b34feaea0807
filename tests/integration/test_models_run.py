"""Whole runs of models that need a copy of the weights on each side: the proof passes, and new weights arrive.

The conditional models need torchvision beside vLLM's CPU build, which the locks leave out.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from environments.demo_model.model import build_tokenizer
from tests.golden.models import CONDITIONAL, IN_16_BITS, adapted_modules, save_model
from tests.processes import ROOT, tail
from tests.quantised_models import METHODS
from tests.runs import finished, of_mode, rows, started

pytestmark = pytest.mark.timeout(400)

WITHOUT_TORCHVISION = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="vLLM serves conditional models with torchvision only"
)
RUNS = [
    ("deepseek_v2", "broadcast"),  # vLLM's CPU build does not serve LoRA for mixtures of experts
    *(
        pytest.param(architecture, mode, marks=WITHOUT_TORCHVISION)
        for architecture in CONDITIONAL
        for mode in ("lora_only", "broadcast")
    ),
]


@pytest.mark.parametrize(("architecture", "mode"), RUNS)
def test_a_run_passes_its_proof_and_trains(tmp_path: Path, architecture: str, mode: str) -> None:
    tokenizer = build_tokenizer()
    folder, log = tmp_path / "model", tmp_path / "log"
    save_model(architecture, folder, vocabulary=len(tokenizer))
    tokenizer.save_pretrained(folder)
    # Random models get no rewards: the entropy bonus trains them.
    options = of_mode(mode, env="arithmetic", training_steps=2, entropy_coef=0.01)
    if mode == "lora_only":
        options["lora-target-modules"] = ",".join(adapted_modules(architecture))
    if architecture in IN_16_BITS:
        options["dtype"] = "bfloat16"
    with started(folder, tmp_path / "run", log, **options) as process:
        assert finished(process, log, 350) == 0, tail(log)
    trained = rows(tmp_path / "run")
    assert [row["step"] for row in trained] == [1, 2]
    limit = 0.1 if architecture in IN_16_BITS else 1e-3
    assert trained[0]["train/logprob_gap"] < limit  # samples of later steps may be of the version before


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_base_is_served_as_it_is_and_trained(tmp_path: Path, method: str) -> None:
    options = of_mode("lora_only", env="arithmetic", training_steps=2, entropy_coef=0.01, dtype="bfloat16")
    with started(ROOT / "tests/data/quantised" / method, tmp_path / "run", tmp_path / "log", **options) as process:
        assert finished(process, tmp_path / "log", 350) == 0, tail(tmp_path / "log")
    trained = rows(tmp_path / "run")
    assert [row["step"] for row in trained] == [1, 2]
    assert trained[0]["train/logprob_gap"] < 0.05  # both sides compute the same function, in bfloat16
    served = (tmp_path / "run/logs/server.log").read_text()
    assert re.search(rf"\bquantization=(auto_)?{method}\b", served)
