"""What the server decides from its flags: graphs, the worker's process, folders of sockets, the logits' dtype."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import ROOT
from vllm_server import flags, seams

# batch sizes that get a CUDA graph -----------------------------------------------------------------------------


def planned(monkeypatch: pytest.MonkeyPatch, default: int = 1024, **given: Any) -> list[int] | None:
    """The sizes on a GPU where vLLM computes `default` sequences at one time."""
    monkeypatch.setattr(flags, "_default_max_num_seqs", lambda world_size: default)
    unset = {
        "cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None, "max_num_seqs": None,
        "compilation_config": SimpleNamespace(cudagraph_capture_sizes=None), "speculative_config": None,
        "enforce_eager": False, "pipeline_parallel_size": 1, "tensor_parallel_size": 1,
        "performance_mode": "balanced",
    }  # fmt: skip
    args = Namespace(**unset | given)
    flags._plan_graphs(args)
    return args.cudagraph_capture_sizes


@pytest.mark.parametrize(
    ("sequences", "last"),
    [(1, [1, 2]), (3, [3, 4, 6]), (100, [160, 192, 200]), (600, [512, 600, 640, 768, 1024]), (4096, [640, 768, 1024])],
)
def test_graphs_up_to_twice_the_sequences(monkeypatch: pytest.MonkeyPatch, sequences: int, last: list[int]) -> None:
    sizes = planned(monkeypatch, default=sequences)
    assert sizes is not None
    assert sizes[-len(last) :] == last
    assert min(sequences, 1024) in sizes  # a batch of one token of each is not padded
    assert planned(monkeypatch, default=7, max_num_seqs=sequences) == sizes


@pytest.mark.parametrize(
    "given",
    [
        {"enforce_eager": True},
        {"speculative_config": {"num_speculative_tokens": 3}},
        {"performance_mode": "interactivity"},
        {"max_cudagraph_capture_size": 64},
        {"compilation_config": SimpleNamespace(cudagraph_capture_sizes=[1, 8])},
        {"compilation_config": SimpleNamespace(max_cudagraph_capture_size=8)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_graphs_are_vllms_choice(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    assert planned(monkeypatch, **given) is None


def test_graphs_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, cudagraph_capture_sizes=[1, 5]) == [1, 5]


def test_graphs_vllm_says_how_many_sequences_it_computes() -> None:
    pytest.importorskip("vllm")
    assert flags._default_max_num_seqs(1) >= 16


# where a server's only worker runs -----------------------------------------------------------------------------


MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with one GPU, 8 cores and room in /dev/shm; the folder has its files."""
    monkeypatch.setattr(seams, "device_type", lambda: "cuda")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    monkeypatch.setattr(flags, "_SHM", tmp_path)
    monkeypatch.setattr(flags, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(flags, "_GPUS", tmp_path / "gpus")
    (tmp_path / "gpus" / "0000:00:00.0").mkdir(parents=True)
    monkeypatch.setenv(MULTIPROCESSING, "1")  # so that it is restored
    monkeypatch.delenv(MULTIPROCESSING)
    return tmp_path


def placed(**given: Any) -> str | None:
    """Return the executor for a server's arguments."""
    degrees = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data", "prefill_context")}
    args = Namespace(**{"distributed_executor_backend": None} | degrees | given)
    flags._place_worker(args)
    return args.distributed_executor_backend


def test_worker_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed() == "mp"
    for quota, executor in (("max 100000", "mp"), ("800000 100000", "mp"), ("750000 100000", "uni")):
        (machine / "cpu.max").write_text(f"{quota}\n")
        assert placed() == executor
    (machine / "cpu.max").unlink()
    (machine / "gpus" / "0000:01:00.0").mkdir()
    assert placed() == "uni", "8 cores for two GPUs"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert placed() == "mp"


def test_worker_without_room_for_its_queues(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))  # Docker's default
    assert placed() == "uni"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("degree", ["tensor", "pipeline", "data", "prefill_context"])
def test_worker_of_several_is_placed_by_vllm(degree: str) -> None:
    assert placed(**{f"{degree}_parallel_size": 2}) is None


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("asked", "executor", "said"), [(None, "uni", "0"), ("uni", "uni", "0"), ("mp", "mp", None)])
def test_worker_on_a_cpu(monkeypatch: pytest.MonkeyPatch, asked: str | None, executor: str, said: str | None) -> None:
    monkeypatch.setattr(seams, "device_type", lambda: "cpu")
    assert placed(distributed_executor_backend=asked) == executor
    assert os.environ.get(MULTIPROCESSING) == said  # vLLM on a CPU would turn "uni" into "mp"


# the folder of sockets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "wanted"),
    [("/" + "x" * 19, None), ("/" + "x" * 69, None), ("/" + "x" * 90, "/tmp"), ("/" + "ü" * 40, "/tmp")],
    ids=["short", "longest", "long", "bytes count, not characters"],
)
def test_sockets_in_a_short_folder(monkeypatch: pytest.MonkeyPatch, folder: str, wanted: str | None) -> None:
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv(flags.SOCKETS_VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(flags.SOCKETS_VARIABLE)
    flags._place_sockets()
    assert (os.environ.get(flags.SOCKETS_VARIABLE), tempfile.gettempdir()) == (wanted, folder)


def test_sockets_of_a_long_folder_are_elsewhere_and_files_in_it(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    code = """
import multiprocessing.connection, os, tempfile
from vllm_server import flags
flags._place_sockets()
address = multiprocessing.connection.arbitrary_address("AF_UNIX")
multiprocessing.connection.Listener(address).close()
print(os.environ[flags.SOCKETS_VARIABLE], tempfile.gettempdir(), os.path.dirname(address))
"""
    environment = {name: value for name, value in os.environ.items() if name != flags.SOCKETS_VARIABLE}
    environment["TMPDIR"] = str(long)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    variable, files, sockets_folder = done.stdout.split()
    assert (variable, files) == ("/tmp", str(long))
    assert Path(sockets_folder).parent == Path("/tmp")
    assert not Path(sockets_folder).exists(), "it stays behind"


# the logits' dtype ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "asked", "given", "invariant", "head"),
    [
        ("cpu", "auto", {}, "0", None),
        ("cuda", "auto", {}, "0", "float32"),
        ("cpu", "float32", {"rope_theta": 1e4}, "0", "float32"),
        ("cuda", "model", {}, "0", None),
        ("cuda", "auto", {"head_dtype": "bfloat16"}, "0", "bfloat16"),
        ("cuda", "auto", {}, "1", None),
    ],
)
def test_logits_dtype_is_that_of_vllms_head(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: str, given: dict[str, object], invariant: str, head: str | None
) -> None:
    monkeypatch.setattr(seams, "device_type", lambda: device)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    args = Namespace(model="none", logits_dtype=asked, hf_overrides=given)
    flags._plan_logits(args)
    assert args.hf_overrides == given | ({} if head is None else {"head_dtype": head})


@pytest.mark.parametrize(
    ("given", "head", "text"),
    [
        ({}, "float32", {"head_dtype": "float32"}),
        ({"head_dtype": "bfloat16"}, "bfloat16", {"head_dtype": "bfloat16"}),
        ({"text_config": {"rope_theta": 1e4}}, "float32", {"head_dtype": "float32", "rope_theta": 1e4}),
    ],
)
def test_logits_dtype_of_a_conditional_models_text_part(
    tmp_path: Path, given: dict[str, Any], head: str, text: dict[str, Any]
) -> None:
    """vLLM builds that part from its own configuration."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"model_type": "gemma3_text"}}))
    args = Namespace(model=str(tmp_path), logits_dtype="float32", hf_overrides=given)
    flags._plan_logits(args)
    assert args.hf_overrides == {"head_dtype": head, "text_config": text}


# what is read before vLLM is imported --------------------------------------------------------------------------


def test_early_reads_names_with_underscores_and_leaves_vllms_flags() -> None:
    given = ["--model", "m", "--max-num-seqs", "4", "--api_key", "a", "b", "--lora-root", "/x_y", "--port=7"]
    args = flags.early([*given, "--enforce_eager"])
    assert (args.model, args.api_key, args.port, args.lora_root) == ("m", ["a", "b"], 7, ["/x_y"])
