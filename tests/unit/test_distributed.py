"""Several trainer processes do what one does: the same weights, the same figures, an end for all of them."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3Config

from grpo_trainer import loop
from grpo_trainer.batch.batching import ready
from grpo_trainer.config.options import build
from grpo_trainer.config.train import DistributedConfig, TrainConfig
from grpo_trainer.engine.tensor_shards import Cut, cut_model, shard_of
from grpo_trainer.errors import ConfigError, ModelError, TrainingError
from grpo_trainer.loop import servers_there
from grpo_trainer.optim.eight_bits import recoded
from grpo_trainer.parallel import shard_states
from grpo_trainer.parallel.shard_states import STATES_FOLDER
from grpo_trainer.parallel.world import World, buckets, join
from grpo_trainer.saving.manifest import check_files, read_state
from grpo_trainer.trainer import Trainer
from tests.golden.models import CONFIGS, SIZES, random_model
from tests.integration.serving import save_tiny_model
from tests.processes import free_port, modules, said_by
from tests.unit import two_trainers
from tests.unit.factories import batch, refusing, sample
from tests.unit.paired_trainers import DIED, STEPS, UNREPORTED
from tests.unit.tensor_trainers import CASES
from tests.unit.tiny_lora import tiny_lora

pytestmark = pytest.mark.usefixtures("warm_trainers")


def test_buckets_hold_one_dtype_each_and_no_more_than_fits() -> None:
    tensors = [torch.zeros(4), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3), torch.zeros(100), torch.zeros(1)]
    sizes = [[tensor.numel() for tensor in bucket] for bucket in buckets(tensors, limit=32)]
    assert sizes == [[4, 3], [100], [1], [2]]
    assert buckets([]) == []


def test_one_process_is_alone_and_each_of_several_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    world = join(DistributedConfig(), on_gpu=False)
    assert world.alone and world.leads
    assert world.gather("x") == ["x"]
    parameter = torch.nn.Parameter(torch.zeros(2))
    world.sum_gradients([parameter])
    world.check_agreement([parameter])
    assert parameter.grad is None
    with refusing(ConfigError, "rank 999 of 1000", words=["GPU"]):
        join(DistributedConfig(trainer_rank=999, world_size=1000, init_method="tcp://127.0.0.1:1"), on_gpu=True)


@pytest.mark.parametrize(
    ("mode", "waits"),
    [("lora_only", 1), ("broadcast", 1), ("none", 0), ("lora_restart", 0), ("shared_vllm", 0)],
)
def test_servers_there_waits_for_servers(monkeypatch: pytest.MonkeyPatch, mode: str, waits: int) -> None:
    """Those that start elsewhere are waited for before the memory is measured."""
    asked: list[object] = []
    monkeypatch.setattr(loop, "wait_for_servers", lambda config, _: asked.append(config))
    servers_there(build(TrainConfig, {"model": "m", "weight_bridge_mode": mode}), World(), lambda: None)()
    assert len(asked) == waits


@pytest.mark.parametrize("has_head", [True, False])
def test_a_teachers_unknown_token_is_found_before_a_pass(has_head: bool) -> None:
    """Of a model, too, whose configuration has the size of the vocabulary in that of its text."""
    trainer = Trainer(tiny_lora(), build(TrainConfig, {"model": "x", "distill_coef": 1.0}))
    assert trainer.forward.head is not None
    base = trainer.model.get_base_model()  # type: ignore[operator]
    base.config = Gemma3Config(text_config={"vocab_size": 64})
    assert not hasattr(base.config, "vocab_size")
    if not has_head:
        trainer.forward.head = None
    unknown = sample([5], [6], 1.0, teacher=[{64: -0.1}]), sample([5], [7], 0.0)
    with refusing(TrainingError, "distill_token_ids", got="64"):
        trainer.step(batch(unknown), 0)


# ---------------------------------------------------------------- real processes

UNEVEN = ("batch_size=1", "entropy_coef=0.1")  # so that one process has more passes than the other
Sharded = tuple[Path, dict[str, Any], dict[str, Any]]
SHARDED = ("weight_bridge_mode=none", "loss=gspo", "updates_per_batch=2", "lr=1e-4", "sharding=full", *UNEVEN)


def start(size: int, folder: Path, *options: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    return modules("tests.unit.two_trainers", *([rank, size, port, folder, *options] for rank in range(size)))


def run(size: int, folder: Path, *options: str) -> dict[str, Any]:
    """Return the weights of a trainer of `size` processes; a single one runs in this process."""
    if size == 1:
        threads = torch.get_num_threads()
        two_trainers.main(0, 1, 0, folder, dict(option.split("=", 1) for option in options))
        torch.set_num_threads(threads)
    else:
        said_by(start(size, folder, *options), [0] * size)
    return torch.load(folder / f"led_by_{size}.pt")


def assert_alike(one: dict[str, Any], several: dict[str, Any]) -> None:
    assert one["weights"].keys() == several["weights"].keys()
    for name, weight in one["weights"].items():
        assert torch.allclose(weight, several["weights"][name], atol=5e-6, rtol=1e-4), name
    assert torch.allclose(one["probe"], several["probe"], atol=1e-4)
    for value in several["scores"].tolist():  # of rank 0's share
        assert any(value == pytest.approx(known, abs=1e-4) for known in one["scores"].tolist())
    rows = [json.loads(found["metrics"]) for found in (one, several)]
    for alone, together in zip(*rows, strict=True):
        assert alone.keys() == together.keys()
        for key in alone.keys() - {key for key in alone if key.endswith("time")}:
            slack = 0.05 if key == "train/changed_fraction" else 2e-5  # by updates near the spacing of float32
            assert alone[key] == pytest.approx(together[key], rel=2e-3, abs=slack), key


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, warm_trainers: None) -> Sharded:
    """A folder, and what one process and two came to in it, each with a part of all weights."""
    folder = tmp_path_factory.mktemp("sharded")
    save_tiny_model(folder / "model")
    return folder, run(1, folder, *SHARDED), run(2, folder, *SHARDED)


@pytest.mark.parametrize(
    "options",
    [
        ("weight_bridge_mode=lora_only", "lora_r=8", "loss=dapo", "kl_beta=0.1"),
        ("weight_bridge_mode=none", "loss=gspo", "updates_per_batch=2", "lr=1e-4", "sharding=none"),
    ],
    ids=["adapter", "all weights"],
)
def test_two_processes_train_as_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    save_tiny_model(tmp_path / "model")
    assert_alike(run(1, tmp_path, *options), run(2, tmp_path, *options))


def test_two_sharded_processes_train_as_one(sharded: Sharded) -> None:
    folder, alone, together = sharded
    assert_alike(alone, together)
    for size in (1, 2):  # a checkpoint is an ordinary one
        config = json.loads((folder / f"checkpoints{size}" / "step_3" / "config.json").read_text())
        assert config["architectures"] == ["Qwen2ForCausalLM"]


@pytest.mark.complete
def test_sharding_cuts_states_in_8_bits_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path / "model")
    eight = ("weight_bridge_mode=none", "optimizer=adamw_8bit", "lr=1e-4", "sharding=full")
    saved = {size: run(size, tmp_path, *eight) for size in (1, 2)}
    ends = (tmp_path / str(number) for number in itertools.count())

    def off(size: int, writers: int) -> float:
        """How far from where the writers themselves came to."""
        resumed = f"resume={tmp_path}/checkpoints{writers}/step_3"
        gone_on = run(size, tmp_path, *eight, resumed, f"save_path={next(ends)}")
        return max_difference(gone_on["weights"], saved[writers]["later"])

    def forgotten(codes: torch.Tensor, *of_it: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = recoded(codes, *of_it, **more)
        return codes, torch.zeros_like(scales)

    assert off(2, 2) == 0
    found = off(1, 2), off(2, 1)
    monkeypatch.setattr(shard_states, "recoded", forgotten)
    lost = off(1, 2)
    assert max(found) < 5e-5 < 1e-4 < lost, (found, lost)  # the blocks of steps to come are others, too


@pytest.mark.complete
def test_any_number_of_processes_resumes_what_any_number_wrote(sharded: Sharded) -> None:
    """As if the run had not ended."""
    folder, alone, together = sharded

    def gone_on(size: int, writers: int) -> dict[str, torch.Tensor]:
        saved = f"resume={folder}/checkpoints{writers}/step_3"
        return run(size, folder, *SHARDED, saved, f"save_path={folder}/{writers}_then_{size}")["weights"]

    states = folder / "checkpoints2" / "step_3" / STATES_FOLDER
    assert sorted(file.name for file in states.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    check_files(state := read_state(states.parent))
    assert {f"{STATES_FOLDER}/{file.name}" for file in states.iterdir()} < state.files.keys(), "damage would be found"
    undisturbed = together["later"]
    assert max_difference(undisturbed, together["weights"]) > 1e-4
    assert max_difference(gone_on(2, 2), undisturbed) == 0
    assert max_difference(gone_on(1, 2), undisturbed) < 1e-6
    assert max_difference(gone_on(2, 1), alone["later"]) < 1e-6


def max_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


ENDS = {
    "the first is killed": ("", ""),
    "the first fails": ("MemoryError: a layer has failed", ""),
    "the second fails": ("rank 1: a layer has failed", "MemoryError: a layer has failed"),
}
"""What ends one of two processes -> what each then says."""


@pytest.mark.parametrize("how", ENDS)
def test_processes_end_if_one_of_them_ends(tmp_path: Path, how: str) -> None:
    """A process that finds the other gone says what that one has said."""
    save_tiny_model(tmp_path / "model")
    if fails := how.endswith("fails"):
        (tmp_path / f"fail{int(how.startswith('the second'))}").touch()
    mode = ("weight_bridge_mode=none",) if fails else ("weight_bridge_mode=lora_only", "lora_r=8")
    processes = start(2, tmp_path, *mode)
    try:
        if not fails:
            for process in processes:
                assert process.stdout is not None
                assert any(line == "joined\n" for line in process.stdout), "they have met"
            os.kill(processes[0].pid, signal.SIGKILL)
        said = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(process.returncode for process in processes), said[1][-2000:]
    for words, text in zip(ENDS[how], said, strict=True):
        assert words in text, text[-2000:]


def test_all_processes_get_what_the_first_does_or_its_error(tmp_path: Path) -> None:
    """They stay in step, and only the first reports an error that all have."""
    port = free_port()
    said = said_by(modules("tests.unit.leading", *([rank, port, tmp_path] for rank in range(2))), [1, 0])
    assert "TrainingError: ending" in said[0] and "TrainingError" not in said[1]


def test_a_process_is_told_its_share_and_no_more() -> None:
    config = build(TrainConfig, {"model": "x", "seq_len": 10_000, "batch_size": 2})
    long = [[sample([5], [*range(2000)], 1.0), sample([5], [*range(2000)], 0.0)] for _ in range(4)]
    whole = ready(batch(*long), config, processes=4)
    first, second, *_ = whole.shares()
    assert len(whole.shares()) == 4 and first is whole and second.microbatches == whole.others[0]
    (microbatch,) = second.microbatches
    tensors = [value for value in vars(microbatch).values() if isinstance(value, torch.Tensor)]
    assert 2 * 2001 * 8 < sum(tensor.nbytes for tensor in tensors) < len(pickle.dumps(second))
    assert len(pickle.dumps(second)) < 1.1 * sum(tensor.nbytes for tensor in tensors) + 10_000
    assert not second.sequences
    assert second.largest_weight == whole.largest_weight == 1 / (8 * 2000)


# a shard of every matrix each ----------------------------------------------------------------------------------------


RANKS = 2
TOLERANCE = {"16 bits": (1e-3, 0.05), "8-bit states": (1e-5, 1e-3)}
"""Of losses and weights: rounding to 16 bits is random, and blocks of 8-bit states begin at other elements."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, warm_trainers: None) -> list[dict[str, Any]]:
    """Of one process, then of each of two."""
    folder, port = tmp_path_factory.mktemp("trained"), free_port()
    ranks = [(0, 1), (0, RANKS), (1, RANKS)]
    said_by(modules("tests.unit.tensor_trainers", *([rank, size, port, folder] for rank, size in ranks)), [0] * 3)
    return [torch.load(folder / f"rank{rank}of{size}.pt") for rank, size in ranks]


@pytest.mark.parametrize("case", CASES)
def test_two_shards_train_as_one_model(results: list[dict[str, Any]], case: str) -> None:
    alone, first, second = (result[case] for result in results)
    of_losses, of_weights = TOLERANCE.get(case, (1e-6, 1e-6))
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], abs=of_losses)
    assert first["norms"] == second["norms"] == pytest.approx(alone["norms"], rel=0.05 if case == "16 bits" else 1e-4)
    assert first["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        assert first["weights"][name].dtype == weight.dtype
        assert torch.allclose(first["weights"][name], weight, atol=of_weights, rtol=0), name
    assert all(map(torch.equal, first["everywhere"], second["everywhere"])), "norms are rounded once for all"
    assert all(torch.equal(first["prepared"][name], weight) for name, weight in first["weights"].items())
    if case not in TOLERANCE:
        assert torch.allclose(first["logprobs"], alone["logprobs"], atol=1e-5), "the model's own logits"
    assert first["size"] < 0.53 * alone["size"] and second["size"] < 0.53 * alone["size"]

    # States are gathered as one process has them, and cut again.
    theirs, ours = alone["states"]["state"], first["states"]["state"]
    assert ours.keys() == theirs.keys()
    for number, state in theirs.items():
        shapes = {key: value.shape for key, value in state.items() if torch.is_tensor(value) and value.ndim}
        gathered = {key: value.shape for key, value in ours[number].items() if torch.is_tensor(value)}
        assert gathered == shapes
    for number, state in first["kept"].items():
        for key, value in state.items():
            if torch.is_tensor(value) and value.dtype == torch.float32 and case not in TOLERANCE:
                assert torch.equal(first["own"][number][key], value)


@given(st.integers(1, 300), st.integers(1, 8))
def test_parts_of_a_vocabulary_make_up_the_whole(size: int, ranks: int) -> None:
    each = -(-size // 64) * 64 // ranks + 1
    parts = [Cut(0, size, each).own(rank) for rank in range(ranks)]
    assert [index for part in parts for index in part] == list(range(size))


@pytest.mark.parametrize(
    ("architecture", "field", "ranks"),
    [
        *((name, "model.", RANKS) for name in ("phi3", "gemma3", "mixtral", "qwen3_moe")),  # not known how to
        ("qwen2", "num_key_value_heads", 4),  # of which it has two
    ],
)
def test_cut_model_refuses_models_that_it_can_not_cut(architecture: str, field: str, ranks: int) -> None:
    model = random_model(architecture)
    with pytest.raises(ModelError) as refused:
        cut_model(model, 0, ranks)
    assert field in refused.value.field and shard_of(model) is None
    assert refused.value.got == "2" if ranks == 4 else "--server.tensor-parallel-size" in refused.value.fix


def test_a_model_without_weights_is_cut_to_the_shapes_of_vllms_workers() -> None:
    kind, fields = CONFIGS["qwen2"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind(**SIZES | fields))
    shard = cut_model(model, 1, RANKS)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (64, 128)  # 2 of 4 heads of 32
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (32,)  # 1 of 2 heads
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (128, 64)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (128, 48)
    assert shapes["model.layers.0.input_layernorm.weight"] == (128,)
    assert shapes["model.embed_tokens.weight"] == (98 - 64, 128)  # vLLM pads 98 to 128, 64 for each worker
    assert shard.padded["model.embed_tokens.weight"] == 64
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.is_meta for parameter in model.parameters())


# trainers on the weights of their own servers: the same weights everywhere, one version, common fences --------------


def pairs(size: int, folder: Path, *options: str, statuses: tuple[int, ...] | None = None) -> list[dict[str, Any]]:
    """What each rank came to, without an error unless a fault is planted; a rank that it ends writes nothing."""
    port = free_port()
    words = ([rank, size, port, folder, *options] for rank in range(size))
    said_by(modules("tests.unit.paired_trainers", *words), statuses or (0,) * size)
    paths = [folder / f"rank{rank}of{size}.pt" for rank in range(size)]
    results = [torch.load(path) for path in paths if path.exists()]
    planted = any(option.startswith("fault=") for option in options)
    assert planted or not [result["error"] for result in results if "error" in result], results
    return results


@pytest.mark.parametrize(
    "options",
    [(), ("optimizer=adamw_8bit", "bucket_bytes=1")],
    ids=["fp32 states", "8-bit states, each tensor by itself"],
)
def test_two_pairs_train_as_one_and_each_has_half_of_the_states(tmp_path: Path, options: tuple[str, ...]) -> None:
    (alone,) = pairs(1, tmp_path, *options, f"save_path={tmp_path / 'one'}")
    first, second = pairs(2, tmp_path, *options)
    assert max_difference(first["weights"], second["weights"]) == 0.0
    in_8_bits = "optimizer=adamw_8bit" in options
    slack = 2e-4 if in_8_bits else 1e-6  # blocks of 8-bit states begin at other elements
    assert max_difference(first["weights"], alone["weights"]) < slack
    assert first["losses"] == pytest.approx(alone["losses"], abs=1e-5 if in_8_bits else 1e-6)
    assert first["noise"] < 1e-4
    assert first["version"] == alone["version"] == STEPS
    assert first["told"] == second["told"] == alone["told"], "both servers had every fence, of the same version"
    assert first["states"] + second["states"] == pytest.approx(alone["states"], rel=0.02)
    assert first["states"] < 0.6 * alone["states"]


def test_pairs_round_weights_in_16_bits_once_for_all_also_after_a_resume(tmp_path: Path) -> None:
    first, second = pairs(2, tmp_path, "served=bfloat16", "proof=false")
    assert max_difference(first["weights"], second["weights"]) == 0.0
    assert next(iter(first["weights"].values())).dtype == torch.bfloat16
    resumed, _ = pairs(2, tmp_path, "served=bfloat16", "proof=false", "resume=auto")
    assert max_difference(resumed["first"], first["beyond"]) == 0.0, "with its own random numbers"


def test_a_run_of_one_pair_resumes_with_two(tmp_path: Path) -> None:
    pairs(1, tmp_path)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "kept")
    (straight,) = pairs(1, tmp_path, "resume=auto")
    resumed = pairs(2, tmp_path, "resume=auto", f"save_path={tmp_path / 'kept'}")
    for result in resumed:
        assert max_difference(result["weights"], straight["weights"]) < 1e-6
    assert resumed[0]["version"] == straight["version"] == 2 * STEPS


def test_a_rank_whose_server_has_a_copy_of_the_weights_ends_the_run(tmp_path: Path) -> None:
    first, second = pairs(2, tmp_path, "fault=a copy")
    assert first["error"] == "BridgeError" and "http://server-1" in first["field"]
    assert "error" not in second, "rank 0 reports what all have met"
    assert not any(said.startswith("end 1") for said in first["told"] + second["told"]), "it is found before a step"


def test_a_fence_that_one_server_refuses_is_refused_for_all(tmp_path: Path) -> None:
    first, second = pairs(2, tmp_path, "fault=no fence")
    assert first["error"] == "BridgeError" and "http://server-1" in first["field"]
    assert "end 1" not in first["told"] + second["told"]
    (alone,) = pairs(1, tmp_path, f"save_path={tmp_path / 'one'}")
    (resumed,) = pairs(1, tmp_path, "resume=auto")
    assert resumed["losses"][:-1] == pytest.approx(alone["losses"][1:], abs=1e-6), "the checkpoint has the whole step"


def test_a_rank_that_dies_unreported_ends_the_others(tmp_path: Path) -> None:
    (first,) = pairs(2, tmp_path, f"fault={UNREPORTED}", statuses=(0, DIED))
    assert first["error"] == "PeerGoneError"
    assert first["told"][-1] == "end 0", "the last request that rank 0's server received"
