"""Several trainers, each on the weights of its own server: the same weights everywhere, one version, common fences."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import ROOT, free_port
from tests.unit.paired_trainers import DIED, STEPS, UNREPORTED

pytestmark = pytest.mark.usefixtures("warm_trainers")


def run(size: int, folder: Path, *options: str, statuses: tuple[int, ...] | None = None) -> list[dict[str, Any]]:
    """What each rank came to; those that a fault has ended wrote nothing."""
    port = free_port()
    words = [sys.executable, "-m", "tests.unit.paired_trainers"]
    processes = [
        subprocess.Popen(
            [*words, str(rank), str(size), str(port), str(folder), *options],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    said = [process.communicate(timeout=200)[0] for process in processes]
    ended = tuple(process.returncode for process in processes)
    assert ended == (statuses or (0,) * size), "\n".join(text[-3000:] for text in said)
    paths = [folder / f"rank{rank}of{size}.pt" for rank in range(size)]
    return [torch.load(path) for path in paths if path.exists()]


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one["weights"][name] - other["weights"][name]).abs().max()) for name in one["weights"])


def assert_sound(result: dict[str, Any]) -> None:
    assert "error" not in result, (result["error"], result["field"], result["got"])


@pytest.mark.parametrize(
    "options",
    [(), ("optimizer=adamw_8bit",), ("bucket_bytes=1",)],
    ids=["fp32 states", "8-bit states", "each tensor by itself"],
)
def test_two_pairs_train_as_one_and_each_has_half_of_the_states(tmp_path: Path, options: tuple[str, ...]) -> None:
    (alone,) = run(1, tmp_path, *options, f"save_path={tmp_path / 'one'}")
    first, second = run(2, tmp_path, *options)
    for result in (alone, first, second):
        assert_sound(result)
    assert largest_difference(first, second) == 0.0
    in_8_bits = "optimizer=adamw_8bit" in options
    slack = 2e-4 if in_8_bits else 1e-6  # blocks of 8-bit states begin at other elements
    assert largest_difference(first, alone) < slack
    assert first["losses"] == pytest.approx(alone["losses"], abs=1e-5 if in_8_bits else 1e-6)
    assert first["noise"] < 1e-4
    assert first["version"] == alone["version"] == STEPS
    assert first["told"] == second["told"] == alone["told"], "both servers had every fence, of the same version"
    assert first["states"] + second["states"] == pytest.approx(alone["states"], rel=0.02)
    assert first["states"] < 0.6 * alone["states"]


def test_weights_in_16_bits_are_rounded_once_for_all(tmp_path: Path) -> None:
    first, second = run(2, tmp_path, "served=bfloat16", "proof=false")
    assert_sound(first)
    assert largest_difference(first, second) == 0.0
    assert next(iter(first["weights"].values())).dtype == torch.bfloat16


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_resumes_with_another_number_of_pairs(tmp_path: Path, before: int, after: int) -> None:
    run(before, tmp_path)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "kept")
    (straight, *_) = run(before, tmp_path, "resume=auto")
    assert_sound(straight)
    resumed = run(after, tmp_path, "resume=auto", f"save_path={tmp_path / 'kept'}")
    for result in resumed:
        assert largest_difference(result, straight) < 1e-6
        assert_sound(result)
    assert resumed[0]["version"] == straight["version"] == 2 * STEPS


@pytest.mark.parametrize(
    ("fault", "error", "named"),
    [
        ("other weights", "WeightsError", "trainer processes"),
        ("one server", "BridgeError", "boot_id"),
        ("other version", "BridgeError", "version"),
        ("a copy", "BridgeError", "http://server-1"),
        ("other place", "WeightsError", "trainer processes"),
    ],
)
def test_the_proof_sees_every_ranks_server(tmp_path: Path, fault: str, error: str, named: str) -> None:
    first, second = run(2, tmp_path, f"fault={fault}")
    assert first["error"] == error and named in first["field"]
    assert "error" not in second, "rank 0 reports what all have met"
    assert not any(said.startswith("end 1") for said in first["told"] + second["told"]), "nothing was trained"


def test_a_fence_that_one_server_refuses_is_refused_for_all(tmp_path: Path) -> None:
    first, second = run(2, tmp_path, "fault=no fence")
    assert first["error"] == "BridgeError" and "http://server-1" in first["field"]
    assert "end 1" not in first["told"] + second["told"]
    (alone,) = run(1, tmp_path, f"save_path={tmp_path / 'one'}")
    (resumed,) = run(1, tmp_path, "resume=auto")
    assert_sound(resumed)
    assert resumed["losses"][:-1] == pytest.approx(alone["losses"][1:], abs=1e-6), "the checkpoint has the whole step"


def test_rows_in_the_wrong_place_end_the_run(tmp_path: Path) -> None:
    first, _ = run(2, tmp_path, "fault=swapped rows")
    assert first["error"] == "WeightsError" and "1" in first["got"]


@pytest.mark.parametrize(
    ("fault", "last"),  # what rank 0's server was told last
    [
        ("dies before the fence", "end 0"),
        (UNREPORTED, "end 0"),
        ("dies within the fence", "torn"),
        ("dies after the fence", "end 1"),
    ],
)
def test_a_rank_that_dies_ends_the_others(tmp_path: Path, fault: str, last: str) -> None:
    (first,) = run(2, tmp_path, f"fault={fault}", statuses=(0, DIED))
    assert first["error"] == "PeerGoneError"
    assert first["told"][-1] == last
