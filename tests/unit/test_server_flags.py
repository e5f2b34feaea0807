"""What the server refuses, and what it decides from its flags: graphs, the worker's process, sockets, dtypes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.serving import save_tiny_model
from tests.processes import ROOT
from vllm_server import __main__, flags, seams
from vllm_server.checks import keys_of

# what the command refuses, called in this process --------------------------------------------------------------

Command = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Runs the command up to the start of the engine; returns its exit status and the lines of stderr."""
    monkeypatch.setattr("vllm_server.forking.start", lambda: None)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    before = dict(os.environ)

    def run(*argv: object) -> tuple[int, list[str]]:
        capfd.readouterr()
        try:
            status = __main__.main([*map(str, argv)])
        except SystemExit as ended:  # argparse
            status = int(ended.code or 0)
        return status, capfd.readouterr().err.splitlines()

    yield run
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("served") / "model")


def test_command_without_vllm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr("vllm_server.checks.find_spec", lambda name: None)
    status, (said,) = command("--port", 0)
    assert status == 1 and said.startswith("vllm_server: ") and "'grpo-trainer[gpu]'" in said


@pytest.mark.parametrize(
    ("installed", "refused", "warned"),
    [("0.31.9", True, False), ("0.32.0", False, False), ("0.32.4+cu130", False, False), ("0.33.0", False, True)],
)
def test_command_refuses_older_versions_of_vllm_and_warns_of_newer_ones(
    monkeypatch: pytest.MonkeyPatch, command: Command, installed: str, refused: bool, warned: bool
) -> None:
    monkeypatch.setattr("vllm_server.checks.metadata.version", lambda name: installed)
    monkeypatch.setattr(__main__, "_serve", lambda argv: 0)
    status, said = command("--port", 0)
    assert status == refused and (installed in " ".join(said)) is (refused or warned)


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        (["--max-lora-rank", "24"], {}, "choose from 1, 8, 16, 32"),
        (["--lora-keep-versions", "0"], {}, "--lora-keep-versions: got 0, "),
        (["--enable-lora", "--max-cpu-loras", "4"], {}, "vllm_server: --max-cpu-loras: got 4, "),
        (["--shared-weights"], {}, "--shared-weights: got --port 0, "),
        # a model that vLLM does not serve
        ([], {"num_attention_heads": 4}, "got attention heads of size 16, wanted one that the CPU kernels have"),
        ([], {"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "which vLLM serves for pooling only"),
        ([], {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}, "got NobodyForCausalLM, which vLLM"),
        ([], {"architectures": []}, "got a config.json without `architectures`"),
        ([], {"quantization_config": {"quant_method": "awq"}}, "got weights quantised by awq with --dtype float32"),
    ],
)
def test_command_with_a_wrong_flag_or_model_ends_with_a_line_that_says_why(
    command: Command, model: Path, tmp_path: Path, given: list[str], changes: dict[str, object], message: str
) -> None:
    pytest.importorskip("vllm")
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | changes))
    status, said = command("--model", tmp_path / "model", "--port", 0, *given)
    assert status == 2 and message in said[-1]
    assert not changes or said[-1].startswith(f"vllm_server: --model {tmp_path / 'model'}: ")
    assert not given or len(said) < 10, "the message is not below vLLM's hundreds of flags"


def test_command_names_the_holder_of_a_busy_port_before_anything_is_loaded(
    command: Command, model: Path, busy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(__main__, "_serve", lambda argv: pytest.fail("it goes on"))
    status, (said,) = command("--model", model, "--port", busy_port)
    assert status == 2 and said.startswith(f"vllm_server: --port {busy_port}: ") and f" {os.getpid()} (" in said


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--model", "/nowhere/at/all"], "--model /nowhere/at/all: "),
        (["--model", "tests"], "--model tests: "),  # a folder without a model
        (["--model", "/nowhere/at/all", "--host=0.0.0.0"], "--host 0.0.0.0: "),
        (["--model", "/nowhere/at/all", "--host", "::", "--api_key", "k"], "--model /nowhere/at/all: "),
    ],
)
def test_command_with_a_wrong_path_or_no_key_is_one_line(
    command: Command, given: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    status, (said,) = command("--port", 0, *given)
    assert status == 2 and said.startswith(f"vllm_server: {named}")


def test_keys_come_from_the_flag_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert keys_of(None) == keys_of([""]) == ()
    monkeypatch.setenv("VLLM_API_KEY", "variable")
    assert keys_of(None) == ("variable",)
    assert keys_of(["a", "b"]) == ("a", "b")


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
    assert sizes is not None and sizes[-len(last) :] == last
    assert min(sequences, 1024) in sizes  # a batch of one token of each is not padded
    assert planned(monkeypatch, default=7, max_num_seqs=sequences) == sizes


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"enforce_eager": True}, None),
        ({"speculative_config": {"num_speculative_tokens": 3}}, None),
        ({"performance_mode": "interactivity"}, None),
        ({"max_cudagraph_capture_size": 64}, None),
        ({"compilation_config": SimpleNamespace(cudagraph_capture_sizes=[1, 8])}, None),
        ({"compilation_config": SimpleNamespace(max_cudagraph_capture_size=8)}, None),
        ({"cudagraph_capture_sizes": [1, 5]}, [1, 5]),
    ],
)
def test_graphs_are_vllms_or_the_users_choice(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], sizes: list[int] | None
) -> None:
    assert planned(monkeypatch, **given) == sizes


def test_graphs_vllm_says_how_many_sequences_it_computes() -> None:
    pytest.importorskip("vllm")
    assert flags._default_max_num_seqs(1) >= 16


# where a server's only worker runs -----------------------------------------------------------------------------


MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a machine's files."""
    monkeypatch.setattr(seams, "device_type", lambda: "cuda")
    for name, place in (("_SHM", "."), ("_QUOTA", "cpu.max"), ("_GPUS", "gpus")):
        monkeypatch.setattr(flags, name, tmp_path / place)
    monkeypatch.setenv(MULTIPROCESSING, "1")  # so that it is restored
    monkeypatch.delenv(MULTIPROCESSING)
    return tmp_path


def placed(**given: Any) -> str | None:
    """Return the executor for a server's arguments."""
    degrees = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data", "prefill_context")}
    args = Namespace(**{"distributed_executor_backend": None} | degrees | given)
    flags._place_worker(args)
    return args.distributed_executor_backend


@pytest.mark.parametrize(
    ("cores", "quota", "gpus", "free", "executor"),
    [
        (8, None, 1, 1 << 30, "mp"),
        (8, "max 100000", 1, 1 << 30, "mp"),
        (8, "800000 100000", 1, 1 << 30, "mp"),
        (8, "750000 100000", 1, 1 << 30, "uni"),
        (8, None, 2, 1 << 30, "uni"),
        (16, None, 2, 1 << 30, "mp"),
        (8, None, 1, 64 << 20, "uni"),  # Docker's /dev/shm has no room for the worker's queues
    ],
)
def test_worker_has_its_own_process_if_there_is_room(
    machine: Path, monkeypatch: pytest.MonkeyPatch, cores: int, quota: str | None, gpus: int, free: int, executor: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    for number in range(gpus):
        (machine / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    if quota:
        (machine / "cpu.max").write_text(f"{quota}\n")
    assert placed() == executor


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


CONDITIONAL = {"text_config": {"model_type": "gemma3_text"}}
"""vLLM builds the text part of such a model from that part's own configuration."""


@pytest.mark.parametrize(
    ("device", "asked", "given", "invariant", "model", "wanted"),
    [
        ("cpu", "auto", {}, "0", {}, {}),
        ("cuda", "auto", {}, "0", {}, {"head_dtype": "float32"}),
        ("cpu", "float32", {"rope_theta": 1e4}, "0", {}, {"head_dtype": "float32", "rope_theta": 1e4}),
        ("cuda", "model", {}, "0", {}, {}),
        ("cuda", "auto", {"head_dtype": "bfloat16"}, "0", {}, {"head_dtype": "bfloat16"}),
        ("cuda", "auto", {}, "1", {}, {}),
        ("cuda", "auto", {}, "0", CONDITIONAL, {"head_dtype": "float32", "text_config": {"head_dtype": "float32"}}),
        (
            *("cuda", "auto", {"head_dtype": "bfloat16", "text_config": {"rope_theta": 1e4}}, "0", CONDITIONAL),
            {"head_dtype": "bfloat16", "text_config": {"head_dtype": "bfloat16", "rope_theta": 1e4}},
        ),
    ],
)
def test_logits_dtype_is_that_of_vllms_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, asked: str, given: dict[str, Any], invariant: str,
    model: dict[str, Any], wanted: dict[str, Any],
) -> None:  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    monkeypatch.setattr(seams, "device_type", lambda: device)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    args = Namespace(model=str(tmp_path), logits_dtype=asked, hf_overrides=given)
    flags._plan_logits(args)
    assert args.hf_overrides == wanted


# what is read before vLLM is imported --------------------------------------------------------------------------


def test_early_reads_names_with_underscores_and_leaves_vllms_flags() -> None:
    given = ["--model", "m", "--max-num-seqs", "4", "--api_key", "a", "b", "--lora-root", "/x_y", "--port=7"]
    args = flags.early([*given, "--enforce_eager"])
    assert (args.model, args.api_key, args.port, args.lora_root) == ("m", ["a", "b"], 7, ["/x_y"])
