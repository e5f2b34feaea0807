"""Two trainer processes on the shards of a real server's two workers: one model, one fence, no second copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_trainer.alignment.probes import FAILED
from grpo_trainer.errors import BridgeError
from grpo_trainer.policy import build_policy
from tests.integration.paired import EXCHANGED, STEPS, exchanged_shards
from tests.integration.serving import Serving, assert_ends_at_one_of_many_stop_ids, serving
from tests.integration.test_paired_servers import WIDE, alone, assert_fresh, assert_one_copy, trained
from tests.processes import running, tail
from tests.runs import arguments, finished, of_mode, rows
from tests.shared_contract import MOMENTS, PROMISES, TOLERANCE, SharedContract, settings

pytestmark = pytest.mark.timeout(600)

SHARED = ("--shared-weights", "--tensor-parallel-size", "2", "--bridge-config-path")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("shards")
    with serving(
        folder, *SHARED, str(folder / "bridge.json"), key_value_heads=2, intermediate_size=WIDE
    ) as running_server:
        yield running_server


def shards(server: Serving, folder: Path) -> SharedContract:
    return SharedContract([server], folder, workers=2)


def test_a_completion_ends_at_any_of_many_stop_ids(server: Serving) -> None:
    """The workers are processes of their own, to which requests are sent."""
    assert_ends_at_one_of_many_stop_ids(server)


def test_two_shards_train_as_one_process_on_one_copy(server: Serving, tmp_path: Path) -> None:
    first, second = trained([server], tmp_path, "tensor_parallel_size=2")
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
        assert seen["size"] < 0.6 * whole
        assert seen["states"] <= 2.1 * seen["size"], "8 bytes for each weight of the shard, which has 4"
        assert_one_copy(seen)


@pytest.mark.parametrize("promise", PROMISES)
def test_two_shards_keep(server: Serving, tmp_path: Path, promise: str) -> None:
    getattr(shards(server, tmp_path), promise)()


def test_two_shards_write_while_requests_run(server: Serving, tmp_path: Path) -> None:
    options = {"train_layer_indices": "1", "master_weights": 1}
    shards(server, tmp_path).writes_while_requests_run("recompute", **options)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_dies(server: Serving, tmp_path: Path, moment: str) -> None:
    shards(server, tmp_path).survives_a_rank_that_dies(moment)


def test_ranks_that_differ(server: Serving, tmp_path: Path) -> None:
    shards(server, tmp_path).finds_ranks_that_differ()


@pytest.mark.parametrize("fault", [EXCHANGED, "another worker's matrix"])
def test_shard_in_the_wrong_place(server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before = server.get("/bridge/info").json()
    monkeypatch.setenv("BRIDGE_FILE", before["bridge_config_path"])
    with exchanged_shards() if fault == EXCHANGED else nullcontext(), shards(server, tmp_path).attached(fault) as made:
        made.bridge.connect(0)
        with pytest.raises(BridgeError) as refused:
            made.bridge.prove()
    assert FAILED in refused.value.field
    assert server.get("/bridge/info").json()["policy_version"] == before["policy_version"]


def test_a_trainer_that_does_not_know_of_the_shards_is_refused(server: Serving, tmp_path: Path) -> None:
    config = settings(server.model_folder, tmp_path, [server.url.rpartition(":")[2]])
    with pytest.raises(BridgeError) as refused:
        build_policy(config)
    assert "tp_degree" in refused.value.field and "--server.tensor-parallel-size 2" in refused.value.fix


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
