"""Pairs of server and trainer process on GPUs: on two GPUs they meet by NCCL, on a single one by Gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.integration.paired import STEPS
from tests.integration.serving import START_LIMIT_S, Serving, serving
from tests.integration.test_paired_servers import trained
from tests.processes import answers, wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

TOLERANCE = 0.02  # bfloat16 on both sides


@pytest.fixture(scope="module", params=[1, 2], ids=["one GPU", "two GPUs"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    gpus = request.param
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    with ExitStack() as stack:
        made = []
        for number in range(2):
            folder = tmp_path_factory.mktemp(f"server{number}")
            flags = ["--shared-weights", "--bridge-config-path", str(folder / "bridge.json"), "--max-num-seqs", "16"]
            flags += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30)]
            env = {"CUDA_VISIBLE_DEVICES": str(number % gpus)}
            made.append(stack.enter_context(serving(folder, *flags, env=env)))
            wait_for(
                "a healthy server", lambda at=made[-1].url: answers(f"{at}/health"), made[-1].log, START_LIMIT_S
            )  # fmt: skip
        yield made


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_pairs_write_the_same_rounded_weights_and_every_server_follows(
    servers: list[Serving], tmp_path: Path, optimizer: str, request: pytest.FixtureRequest
) -> None:
    gpus = request.node.callspec.params["servers"]
    first, second = trained(servers, tmp_path, f"optimizer={optimizer}", f"gpus={gpus}")
    assert "error" not in first, first["error"]
    assert len(first["versions"]) == STEPS + 1 and max(first["gaps"]) < TOLERANCE
    assert first["boot"] != second["boot"]
    for seen in (first, second):
        assert seen["states"] <= 4.2 * seen["size"], "at most 8 bytes for half of the weights, which have 2"
        assert seen["others"] < 0.5 * seen["size"], seen["largest"]
