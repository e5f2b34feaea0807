"""Two trainer processes on the shards of a real server's two workers: one model, one fence, no second copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_trainer.alignment.proof import FAILED
from grpo_trainer.errors import BridgeError
from grpo_trainer.policy import build_policy
from tests.integration.paired import DIED, STEPS, settings
from tests.integration.serving import Serving, serving
from tests.integration.test_paired_servers import alone, assert_fresh
from tests.integration.test_paired_servers import trained as trained_by_two
from tests.processes import running, tail
from tests.runs import arguments, finished, of_mode, rows

pytestmark = pytest.mark.timeout(600)

TOLERANCE = 1e-4
SHARED = ("--shared-weights", "--tensor-parallel-size", "2", "--bridge-config-path")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shards")
    with serving(folder, *SHARED, str(folder / "bridge.json"), key_value_heads=2) as running_server:
        yield running_server


def trained(server: Serving, folder: Path, *options: str, statuses: tuple[int, int] = (0, 0)) -> list[dict[str, Any]]:
    """What each rank saw; nothing of one that died."""
    return trained_by_two([server], folder, "tensor_parallel_size=2", *options, statuses=statuses)


def test_two_shards_train_as_one_process_and_torn_ones_are_healed(server: Serving, tmp_path: Path) -> None:
    first, second = trained(server, tmp_path)
    assert "error" not in first, first["error"]
    losses, weights = alone(server, tmp_path / "alone")
    assert first["losses"] == pytest.approx(losses, abs=1e-6)
    for name, weight in weights.items():
        assert torch.allclose(first["weights"][name], weight, atol=1e-6, rtol=0), name
    assert first["noise"] < TOLERANCE and max(first["gaps"]) < TOLERANCE
    assert first["versions"] == list(range(STEPS + 1)) and first["answered"] == first["versions"][1:]
    assert first["boot"] == second["boot"]
    whole = sum(weight.nbytes for weight in weights.values())
    for seen in (first, second):
        assert seen["size"] < 0.6 * whole and seen["mapped"] == seen["size"], "every parameter is in its worker's file"
        assert seen["states"] <= 2.1 * seen["size"], "8 bytes for each weight of the shard, which has 4"
        assert seen["others"] < 0.3 * seen["size"], "a second copy"
        assert seen["files"] == 1, "the other worker's shard is not mapped"
    (left,) = trained(server, tmp_path / "torn", "fault=dies within the fence", statuses=(0, DIED))
    assert left["error"][0] == "PeerGoneError"
    assert server.get("/health").status_code == 503, "rank 0 has reported it"
    refused, _ = trained(server, tmp_path / "refused")
    assert refused["error"][0] == "CommonBridgeError" and "torn" in refused["error"][1]
    healed, _ = trained(server, tmp_path, "resume=auto")
    assert "error" not in healed, healed["error"]
    assert healed["versions"][0] > STEPS and max(healed["gaps"]) < TOLERANCE
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    "options",
    [("in_flight=abort", "optimizer=adamw_8bit"), ("in_flight=recompute", "train_layer_indices=1", "master_weights=1")],
)
def test_each_write_is_served_at_once(server: Serving, tmp_path: Path, options: tuple[str, ...]) -> None:
    first, _ = trained(server, tmp_path, *options)
    assert "error" not in first, first["error"]
    assert max(first["gaps"]) < TOLERANCE and first["answered"] == first["versions"][1:]


@pytest.mark.parametrize(("moment", "version"), [("before", 0), ("after", 1)])
def test_a_rank_that_dies_outside_the_fence_leaves_whole_weights(
    server: Serving, tmp_path: Path, moment: str, version: int
) -> None:
    before = server.get("/bridge/info").json()["policy_version"]
    (left,) = trained(server, tmp_path, f"fault=dies {moment} the fence", statuses=(0, DIED))
    assert left["error"][0] == "PeerGoneError"
    assert server.get("/health").status_code == 200
    assert server.get("/bridge/info").json()["policy_version"] == before + version


@pytest.mark.parametrize("fault", ["exchanged shards", "another worker's matrix"])
def test_a_shard_in_the_wrong_place_is_seen_before_anything_is_trained(
    server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("BRIDGE_FILE", server.get("/bridge/info").json()["bridge_config_path"])
    before = server.get("/bridge/info").json()
    first, second = trained(server, tmp_path, f"fault={fault}")
    assert first["error"][0] == "CommonBridgeError" and FAILED in first["error"][1]
    assert "losses" not in first and "error" not in second, "it waits until rank 0 ends it"
    after = server.get("/bridge/info").json()
    assert after["policy_version"] == before["policy_version"]


def test_a_trainer_that_does_not_know_of_the_shards_is_refused(server: Serving, tmp_path: Path) -> None:
    config = settings(server.model_folder, tmp_path, [server.url.rpartition(":")[2]])
    with pytest.raises(BridgeError) as refused:
        build_policy(config)
    assert "tp_degree" in refused.value.field and "--tensor-parallel-size 2" in refused.value.fix


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def two_headed(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its only head of keys and values twice, which computes the same."""
    folder = tmp_path_factory.mktemp("two") / "demo-model"
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    config = model.config
    config.num_key_value_heads = 2
    wide = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    twice = ("k_proj", "v_proj")
    wide.load_state_dict(
        {
            name: torch.cat([value, value]) if any(part in name for part in twice) else value
            for name, value in model.state_dict().items()
        }
    )
    wide.save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_model).save_pretrained(folder)
    return folder


def test_a_run_goes_on_from_shards_to_pairs_to_shards(two_headed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = of_mode("shared_vllm", **{"trainer-gpus": 2})
    shards = {**options, "server.tensor_parallel_size": 2}
    for steps, own in ((3, shards), (4, {**options, "resume": "auto"}), (5, {**shards, "resume": "auto"})):
        log = tmp_path / f"log{steps}"
        with running(*arguments(two_headed, run_dir, **{**own, "training-steps": steps}), log=log) as process:
            assert finished(process, log, 300) == 0, tail(log)
    done = rows(run_dir)
    assert [row["step"] for row in done] == [1, 2, 3, 4, 5]
    assert_fresh(done)
    said = (run_dir / "logs" / "trainer-1.log").read_text()
    assert "Single-copy mode active" in said and "bridge proved" in said
