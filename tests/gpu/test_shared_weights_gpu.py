"""One copy of the weights on a GPU: CUDA IPC handles, CUDA graphs on, bfloat16, stochastic rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.policy import SharedWeights, build_policy
from tests.integration.serving import Serving, serving
from tests.processes import ROOT
from tests.shared_contract import WRITES, SharedContract

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

TOLERANCE = 0.02  # bfloat16 on both sides

DIES_ATTACHED = """
import os, signal, sys
from pathlib import Path
from tests.gpu.test_shared_weights_gpu import contract
from tests.integration.serving import Serving
with contract(Serving(sys.argv[1], Path(sys.argv[2]), Path(), Path(), None), Path(sys.argv[3])).attached() as made:
    version = made.bridge.connect(0)
    made.assert_serves(version)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def contract(server: Serving, folder: Path) -> SharedContract:
    """A trainer in the server's memory, in bfloat16; requests in one batch round otherwise than each alone."""
    return SharedContract([server], folder, tolerance=TOLERANCE, repeats=TOLERANCE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shared")
    flags = ["--shared-weights", "--bridge-config-path", str(folder / "bridge.json"), "--max-num-seqs", "16"]
    with serving(folder, *flags, "--kv-cache-memory-bytes", str(1 << 30)) as running_server:
        yield running_server


def test_the_parameters_are_the_servers_own_memory(server: Serving, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    values = {"model": str(server.model_folder), "weight_bridge_mode": "shared_vllm", "vllm_port": port}
    config = build(TrainConfig, values | {"save_path": str(tmp_path)})
    before = torch.cuda.memory_allocated()
    policy = build_policy(config)  # and no trainer, which tries its kernels out
    taken = torch.cuda.memory_allocated() - before
    assert isinstance(policy, SharedWeights) and policy.source.kind == "cuda_ipc"
    parameters = list(policy.model.parameters())
    assert {(parameter.device.type, parameter.dtype) for parameter in parameters} == {("cuda", torch.bfloat16)}
    weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    assert taken < 0.01 * weights + 4096, "attaching took additional memory"


def test_a_trainer_that_is_killed_does_not_hurt_the_server(server: Serving, tmp_path: Path) -> None:
    words = [sys.executable, "-c", DIES_ATTACHED, server.url, str(server.model_folder), str(tmp_path)]
    died = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": path()}, capture_output=True, check=False)
    assert died.returncode == -9, died.stderr.decode()[-2000:]
    assert server.get("/health").status_code == 200
    with contract(server, tmp_path).attached() as made:
        version = made.bridge.connect(0)
        assert made.step()
        made.assert_serves(version + 1)


def test_one_process_follows_each_step_hands_over_and_heals(server: Serving, tmp_path: Path) -> None:
    contract(server, tmp_path).follows_each_step_hands_over_and_heals()


def test_one_process_that_died_writing(server: Serving, tmp_path: Path) -> None:
    contract(server, tmp_path).heals_after_a_trainer_that_died_writing()


@pytest.mark.parametrize("options", WRITES, ids=str)
def test_one_process_writes_while_requests_run(server: Serving, tmp_path: Path, options: dict[str, Any]) -> None:
    contract(server, tmp_path).writes_while_requests_run(**options)


def path() -> str:
    return os.pathsep.join(entry for entry in sys.path if entry)
