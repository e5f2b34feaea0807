"""Pairs and shards on GPUs: on two GPUs trainer processes connect by NCCL, on a single one by Gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.gpu.devices import only_gpus
from tests.integration.paired import STEPS
from tests.integration.serving import START_LIMIT_S, Serving, serving
from tests.integration.test_paired_servers import trained
from tests.processes import answers, modules, wait_for
from tests.shared_contract import SharedContract

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

TOLERANCE = 0.02  # bfloat16 on both sides
VISIBLE = {"pairs on one GPU": [(0,), (0,)], "pairs on two GPUs": [(0,), (1,)], "shards on two GPUs": [(0, 1)]}
"""Layout -> the GPUs of each server."""
OPTIMIZERS = ("adamw", "adamw_8bit")


@dataclass(frozen=True)
class Layout:
    """Running servers that two trainer processes share."""

    servers: list[Serving]
    gpus: int

    @property
    def workers(self) -> int:
        return 2 // len(self.servers)


@pytest.fixture(scope="module")
def _forked_ranks() -> Iterator[None]:
    """Trainer processes are forked from one that has made their imports, which take each of them 15 to 20 s.

    That process sees no GPU: a library that asks for one when it is imported would initialise CUDA. If a forked process
    can't use a GPU all the same, each makes its own imports.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        warm.start(("tests.integration.paired",), packages=("tests",))
    with pytest.MonkeyPatch.context() as patch:
        (trial,) = modules("tests.gpu.devices", [])
        said, _ = trial.communicate(timeout=120)
        if trial.returncode:
            print(f"trainer processes are not forked:\n{said}")
            patch.setenv(warm.COLD, "1")
        yield


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
            if len(visible) > 1:  # the server of shards has CUDA graphs, as the one of a single process
                flags += ["--enforce-eager"]
            starting = serving(folder, *flags, env=only_gpus(*own), key_value_heads=2, wait=False)
            made.servers.append(stack.enter_context(starting))
        request.getfixturevalue("_forked_ranks")  # while the servers start
        for server in made.servers:
            wait_for("a healthy server", lambda at=server.url: answers(f"{at}/health"), server.log, START_LIMIT_S)
        yield made


on_two_gpus = pytest.mark.parametrize(  # NCCL refuses two ranks on one GPU
    "layout", [name for name in VISIBLE if name.endswith("two GPUs")], indirect=True, scope="module"
)


@pytest.mark.parametrize("layout", VISIBLE, indirect=True, scope="module")
def test_pairs_write_the_same_rounded_weights(layout: Layout, tmp_path: Path) -> None:
    options = (f"optimizer={','.join(OPTIMIZERS)}", f"gpus={layout.gpus}", f"tensor_parallel_size={layout.workers}")
    done = trained(layout.servers, tmp_path, *options)
    for optimizer, (first, second) in zip(OPTIMIZERS, done, strict=True):
        assert "error" not in first, (optimizer, first["error"])
        assert len(first["versions"]) == STEPS + 1 and max(first["gaps"]) < TOLERANCE, optimizer
        assert (first["boot"] == second["boot"]) == (len(layout.servers) == 1)
        for seen in (first, second):
            assert seen["states"] <= 4.2 * layout.workers * seen["size"], "8 bytes for half of all weights"
            assert seen["others"] < 0.5 * seen["size"], (optimizer, seen["largest"])


@on_two_gpus
def test_ranks_on_two_gpus_follow_each_step_hand_over_and_heal(layout: Layout, tmp_path: Path) -> None:
    contract(layout, tmp_path).follows_each_step_hands_over_and_heals()


@on_two_gpus
def test_ranks_that_die(layout: Layout, tmp_path: Path) -> None:
    """Not before the fence: the device waits for NCCL, and can't be used again."""
    contract(layout, tmp_path).survives_ranks_that_die("after")


def contract(layout: Layout, folder: Path) -> SharedContract:
    return SharedContract(layout.servers, folder, layout.workers, tolerance=TOLERANCE, repeats=TOLERANCE)
