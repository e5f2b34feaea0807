"""The attached model against real vLLM on the CPU: ten architectures in one process, and one server by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from grpo_trainer.config.train import ModelConfig
from grpo_trainer.errors import BridgeError
from grpo_trainer.shared.attach import attach_model
from grpo_trainer.shared.bridge_file import read_bridge_config
from tests.golden.host import Figures, logprobs
from tests.golden.models import CONFIGS, IN_A_PROCESS, golden
from tests.golden.models import Golden as Report
from tests.golden.stand_in import write_config
from tests.integration.serving import Serving, serving
from tests.processes import ROOT, end
from vllm_server.protocol import BridgeInfo

pytestmark = pytest.mark.timeout(600)

AGAIN = sorted(set(CONFIGS) - {"yi", "deepseek_coder", *IN_A_PROCESS})
"""Compared with vLLM again in each complete lane; of the others there is the record."""
TOLERANCE = 1e-4  # nats a token, mean, in float32
PROMPT = [7 + index % 83 for index in range(270)]  # longer than two blocks of the cache


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `tests.golden.host` wrote about all architectures, one after another in one process."""
    folder = tmp_path_factory.mktemp("architectures")
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.host", str(folder), *AGAIN],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("architecture", AGAIN)
def test_logprobs_are_the_servers_before_and_after_a_write(reports: Path, architecture: str) -> None:
    figures = msgspec.json.decode((reports / f"{architecture}.figures.json").read_bytes(), type=Figures)
    assert figures.own == 0.0  # bit for bit what transformers computes from the files
    assert figures.before < TOLERANCE
    assert figures.moved > 0.1
    assert figures.after < TOLERANCE
    assert figures.attached == len(golden(architecture).found)


@pytest.mark.parametrize("architecture", AGAIN)
def test_vllm_still_has_the_names_and_places_of_the_golden_files(reports: Path, architecture: str) -> None:
    report = msgspec.json.decode((reports / f"{architecture}.json").read_bytes(), type=Report)
    record = golden(architecture)
    assert (report.vllm, report.ties, report.found) == (record.vllm, record.ties, record.found)
    assert report.logprobs == pytest.approx(record.logprobs, abs=1e-3)
    assert report.adapted == pytest.approx(record.adapted, abs=1e-3)


def test_a_model_attached_to_a_server(tmp_path: Path) -> None:
    """Through the file that it wrote, with LoRA on (whose wrappers' names do not show); until it is gone."""
    with serving(tmp_path, "--shared-weights", "--bridge-config-path", str(tmp_path)) as server:
        config = read_bridge_config(tmp_path)
        info = msgspec.json.decode(server.get("/bridge/info").content, type=BridgeInfo)
        assert (info.boot_id, info.bridge_config_path) == (config.boot_id, str(tmp_path / "vllm_bridge_config.json"))
        model = attach_model(config, ModelConfig(model_name=str(server.model_folder)), torch.device("cpu"))
        assert _difference(server, model) < TOLERANCE
        (tmp_path / "kept").mkdir()
        kept = write_config(tmp_path / "kept", config)
        assert read_bridge_config(kept) == config
        end(server.process)
    with pytest.raises(BridgeError) as refused:
        read_bridge_config(kept)
    assert refused.value.field == f"{kept}: server_pid" and str(config.server_pid) in refused.value.got
    assert torch.isfinite(logprobs(model, PROMPT)).all()  # the memory is there as long as somebody maps it


def _difference(server: Serving, model: PreTrainedModel) -> float:
    answer = server.generate(PROMPT, max_tokens=1, prompt_logprobs=0)
    assert answer.prompt_logprobs is not None
    given = zip(PROMPT[1:], answer.prompt_logprobs[1:], strict=True)
    served = torch.tensor([by_token[token] for token, by_token in given if by_token is not None])
    return (served - logprobs(model, PROMPT)).abs().mean().item()
