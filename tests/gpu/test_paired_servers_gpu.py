"""Pairs and shards on GPUs: on two GPUs trainer processes connect by NCCL, on a single one by Gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.gpu.devices import only_gpus
from tests.integration.paired import STEPS
from tests.integration.serving import START_LIMIT_S, Serving, serving
from tests.integration.test_paired_servers import trained
from tests.processes import answers, wait_for
from tests.shared_contract import SharedContract

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

TOLERANCE = 0.02  # bfloat16 on both sides
VISIBLE = {"pairs on one GPU": [(0,), (0,)], "pairs on two GPUs": [(0,), (1,)], "shards on two GPUs": [(0, 1)]}
"""Layout -> the GPUs of each server."""


@dataclass(frozen=True)
class Layout:
    """Running servers that two trainer processes share."""

    servers: list[Serving]
    gpus: int

    @property
    def workers(self) -> int:
        return 2 // len(self.servers)


@pytest.fixture(scope="module")
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layout]:
    visible = VISIBLE[request.param]
    gpus = len({index for own in visible for index in own})
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    made = Layout([], gpus)
    with ExitStack() as stack:
        for number, own in enumerate(visible):
            folder = tmp_path_factory.mktemp(f"server{number}")
            flags = ["--shared-weights", "--bridge-config-path", str(folder / "bridge.json"), "--max-num-seqs", "16"]
            flags += ["--kv-cache-memory-bytes", str(1 << 30), "--tensor-parallel-size", str(2 // len(visible))]
            starting = serving(folder, *flags, env=only_gpus(*own), key_value_heads=2, wait=False)
            made.servers.append(stack.enter_context(starting))
        for server in made.servers:
            wait_for("a healthy server", lambda at=server.url: answers(f"{at}/health"), server.log, START_LIMIT_S)
        yield made


on_each = pytest.mark.parametrize("layout", VISIBLE, indirect=True, scope="module")
on_two_gpus = pytest.mark.parametrize(  # NCCL refuses two ranks on one GPU
    "layout", [name for name in VISIBLE if name.endswith("two GPUs")], indirect=True, scope="module"
)


@on_each
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_pairs_write_the_same_rounded_weights(layout: Layout, tmp_path: Path, optimizer: str) -> None:
    options = (f"optimizer={optimizer}", f"gpus={layout.gpus}", f"tensor_parallel_size={layout.workers}")
    first, second = trained(layout.servers, tmp_path, *options)
    assert "error" not in first, first["error"]
    assert len(first["versions"]) == STEPS + 1 and max(first["gaps"]) < TOLERANCE
    assert (first["boot"] == second["boot"]) == (len(layout.servers) == 1)
    for seen in (first, second):
        assert seen["states"] <= 4.2 * layout.workers * seen["size"], "8 bytes for half of all weights"
        assert seen["others"] < 0.5 * seen["size"], seen["largest"]


@on_two_gpus
def test_ranks_on_two_gpus_follow_each_step_hand_over_and_heal(layout: Layout, tmp_path: Path) -> None:
    contract(layout, tmp_path).follows_each_step_hands_over_and_heals()


@on_two_gpus
def test_ranks_that_die(layout: Layout, tmp_path: Path) -> None:
    """Not before the fence: the device waits for NCCL, and can't be used again."""
    contract(layout, tmp_path).survives_ranks_that_die("after")


def contract(layout: Layout, folder: Path) -> SharedContract:
    return SharedContract(layout.servers, folder, layout.workers, tolerance=TOLERANCE, repeats=TOLERANCE)
