"""Base models in GPTQ and AWQ on a GPU: vLLM serves the files, the trainer has their plain weights, and both agree.

gptqmodel makes the models of the demo model; or GRPO_QUANTISED_MODELS is a folder with `gptq` and `awq`, made by
`python -m tests.quantised_models` elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs
from tests.processes import ROOT, tail
from tests.quantised_models import METHODS, make

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PROVED = re.compile(r"bridge proved: the server is within (\S+) nats .* synthetic adapter moved it by (\S+) and")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if there := os.environ.get("GRPO_QUANTISED_MODELS"):
        return Path(there)
    if importlib.util.find_spec("gptqmodel") is None:
        pytest.skip("needs gptqmodel, or GRPO_QUANTISED_MODELS")
    folder = tmp_path_factory.mktemp("quantised")
    subprocess.run([sys.executable, "-m", "grpo_trainer", "demo-model", f"{folder}/dense"], cwd=ROOT, check=True)
    for method in METHODS:
        make(folder / "dense", folder, method)
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_a_run_proves_trains_and_stays_in_line(models: Path, tmp_path: Path, method: str) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    options = {"training-steps": 5, "batch-size": 256, "dtype": "bfloat16", "drift-limit": 0.2, "on-drift": "stop"}
    options = runs.of_mode("lora_only", **options, **{"server.extra-args": f"--kv-cache-memory-bytes,{1 << 30}"})
    with runs.started(models / method, run_dir, log, **options) as process:
        assert runs.finished(process, log, 500) == 0, tail(log)
    found = PROVED.search((run_dir / "logs" / "trainer.log").read_text())
    assert found, tail(log)
    noise, moved = map(float, found.groups())
    print(f"{method}: the server is {noise} nats a token from the trainer, {moved} from the base model")
    assert noise < 0.1 and moved > 4 * noise  # as of one function in bfloat16: the limit of two would be 0.5
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 5 and any(row.get("train/grad_norm", 0) > 0 for row in rows)
    served = (run_dir / "logs" / "server.log").read_text()
    assert re.search(rf"\bquantization=(auto_)?{method}\b", served)  # the server has the files as they are
