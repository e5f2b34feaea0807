"""`grpo bench sync`: shapes, sums, the server's command, and the load generator against a server that only counts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from grpo_trainer.bench.command import print_figures
from grpo_trainer.bench.figures import counter_total, median_ms, p95_ms
from grpo_trainer.bench.random_model import ensure_model
from grpo_trainer.bench.shapes import SHAPES
from grpo_trainer.bench.sync.generator import GROUP, Demand
from grpo_trainer.bench.sync.measure import Snapshot, memory_figures, publish_figures
from grpo_trainer.bench.sync.options import SyncOptions
from grpo_trainer.bench.sync.subject import Place, Publish, configured, server_spec
from grpo_trainer.config.bridge import ALL_LINEAR, LoraOnly
from grpo_trainer.config.options import build
from grpo_trainer.config.train import ModelConfig
from grpo_trainer.errors import ConfigError, ServerError
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.model.load import load_model
from grpo_trainer.model.lora import add_adapter
from tests.processes import ROOT

# ----------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(("shape", "parameters"), [("0.5b", 494.03e6), ("1.5b", 1543.71e6), ("7b", 7615.62e6)])
def test_shapes_are_those_of_the_published_qwen2_models(shape: str, parameters: float) -> None:
    assert SHAPES[shape].parameters == pytest.approx(parameters, rel=1e-4)


def test_a_training_step_longer_than_the_model_is_refused() -> None:
    asked = {"step_seqs": 8, "step_prompt_len": 1000, "step_completion_len": 1049}
    with pytest.raises(ConfigError) as error:
        build(SyncOptions, asked)
    assert error.value.field == "--step-prompt-len and --step-completion-len"
    assert "2049" in error.value.got and "--max-model-len 2048" in error.value.wanted
    assert build(SyncOptions, asked | {"max_model_len": 2049}).step.step_seqs == 8
    assert build(SyncOptions, asked | {"step_seqs": 0}).step.step_prompt_len == 1000  # no step, no matter


def test_size_of_an_adapter() -> None:
    # 7b, a layer: q, o 2 * (3584 + 3584); k, v 2 * (3584 + 4 * 128); gate, up, down 3 * (3584 + 18944): 90,112
    # rows and columns, times rank 16, 28 layers, 2 bytes: 80.7 MB
    assert SHAPES["7b"].adapter_parameters(16, ALL_LINEAR) * 2 == 90_112 * 16 * 28 * 2 == 80_740_352
    # 0.5b: 2 * 1792 + 2 * (896 + 2 * 64) + 3 * (896 + 4864) = 22,912; times 16, 24 layers, 4 bytes: 35.2 MB
    assert SHAPES["0.5b"].adapter_parameters(16, ALL_LINEAR) * 4 == 22_912 * 16 * 24 * 4 == 35_192_832


def test_a_model_of_a_shape_has_its_sizes_and_is_used_again(tmp_path: Path) -> None:
    folder, shape = tmp_path / "model", SHAPES["tiny"]
    ensure_model(shape, folder, torch.float32)
    model = load_model(ModelConfig(name=str(folder), device="cpu"))
    assert model.num_parameters() == shape.parameters
    adapted = add_adapter(model, LoraOnly(r=16), seed=0)
    lora = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert lora == shape.adapter_parameters(16, ALL_LINEAR)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    ensure_model(shape, folder, torch.float32)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ConfigError) as error:
        ensure_model(SHAPES["7b"], folder, torch.float32)
    assert error.value.field == f"--model-dir {folder}"
    assert str(shape.hidden) in error.value.got and str(SHAPES["7b"].hidden) in error.value.wanted


def test_a_folder_with_other_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError) as error:
        ensure_model(SHAPES["tiny"], tmp_path, torch.float32)
    assert error.value.field == f"--model-dir {tmp_path}" and "no model" in error.value.got
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


# ------------------------------------------------------------------------------------------------------- sums


def test_quantiles_lie_between_neighbours_in_proportion() -> None:
    values = [0.04, 0.01, 0.03, 0.02]  # places 0, 1, 2, 3
    assert median_ms(values) == 25.0  # place 1.5
    assert p95_ms(values) == 38.5  # place 2.85: 30 + 0.85 * 10


def test_phases_add_up_to_the_publish() -> None:
    publishes = [Publish(0.010, 0.001, 0.006, 0.0002), Publish(0.020, 0.002, 0.012, 0.0004)]
    figures = publish_figures(publishes)
    assert (figures["publish_p50_ms"], figures["stall_ms"]) == (15.0, 0.3)
    # requests: 10 - 1 - 6 = 3 and 20 - 2 - 12 = 6
    assert figures["phases"] == {"pack_ms": 1.5, "request_ms": 4.5, "engine_ms": 9.0}


def test_a_counter_is_summed_over_its_labels_and_told_from_longer_names() -> None:
    metrics = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="a } b"} 1200.0
vllm:generation_tokens_total{engine="1",model_name="m"} 3.4e+02
vllm:generation_tokens_total_created{engine="0"} 1.7e+09
plain 7.0 1700000000
"""
    assert counter_total(metrics, "vllm:generation_tokens_total") == 1540.0
    assert counter_total(metrics, "plain") == 7.0
    with pytest.raises(ServerError) as error:
        counter_total(metrics, "vllm:generation_tokens")
    assert "/metrics" in error.value.field and error.value.wanted == "vllm:generation_tokens"


def test_growth_is_from_the_early_publish_to_the_late_one_and_totals_are_of_the_end() -> None:
    early = Snapshot(10, 1000.0, 90, 500.0, 40_000.0, 4, 0)
    late = Snapshot(1000, 1012.5, 90, 500.5, 40_002.0, 4, 5)
    end = Snapshot(1000, 1100.0, 91, 501.0, 41_000.0, 4, 5)
    figures = memory_figures(early, late, end)
    assert (figures["server_rss_growth_mb"], figures["gpu_growth_mb"]) == (12.5, 2.0)
    assert (figures["gpu_total_gb"], figures["server_rss_mb"], figures["files_at_end"]) == (41.0, 1100.0, 5)
    flat = {name: value for name, value in figures.items() if name in ("flat_adapters", "flat_publishes", "flat_files")}
    assert flat == {"flat_adapters": (4, 4), "flat_publishes": (10, 1000), "flat_files": (0, 5)}


def test_the_table_has_a_line_for_each_figure(capsys: pytest.CaptureFixture[str]) -> None:
    print_figures({"publish_p50_ms": 2.5, "load": None, "memory": {"flat_adapters": (4, 5)}}, as_json=False)
    assert [line.split(None, 1) for line in capsys.readouterr().out.splitlines()] == [
        ["publish_p50_ms", "2.5"],
        ["load", "-"],
        ["memory.flat_adapters", "4 → 5"],
    ]


# ---------------------------------------------------------------------------------------- options and processes


def test_sequences_in_flight() -> None:
    assert SyncOptions().concurrency(on_gpu=True) == 256
    assert SyncOptions().concurrency(on_gpu=False) == 16
    assert build(SyncOptions, {"shape": "tiny"}).concurrency(on_gpu=True) == 16
    assert build(SyncOptions, {"concurrency": 64}).concurrency(on_gpu=True) == 64


def test_the_servers_command(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path, tmp_path / "model", True, "bfloat16", ("--seed", "1"))

    def spec(**asked: Any) -> ProcessSpec:
        return server_spec(configured(build(SyncOptions, asked), place), place)

    asked = spec(gpu_memory_utilization=0.3, tensor_parallel_size=2, server_gpus="1,2")
    line = " ".join(asked.argv)
    assert "--tensor-parallel-size 2 --max-lora-rank 16 " in line and line.endswith(" --seed 1")
    assert "--gpu-memory-utilization 0.3" in line and "--kv-cache-memory-bytes" not in line
    assert asked.env["CUDA_VISIBLE_DEVICES"] == "1,2" and asked.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in spec().env  # as the trainer's


def test_the_command_lists_both_benchmarks_and_its_help_needs_no_torch() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)

    usage = run("-m", "grpo_trainer", "bench")
    kinds = re.findall(r"^│ (\w+) ", usage.stdout, re.MULTILINE)
    assert usage.returncode == 2 and kinds == ["loop", "step", "sync", "fence", "api"]
    wrong = run("-m", "grpo_trainer", "bench", "sync", "--shape", "huge")
    assert wrong.returncode == 2 and wrong.stderr.startswith("grpo: --shape: ") and "huge" in wrong.stderr
    code = "import sys, grpo_trainer.bench.__main__; print([m for m in ('torch', 'peft') if m in sys.modules])"
    assert run("-c", code).stdout.strip() == "[]"


# --------------------------------------------------------------------------------------------- the load generator


class _Counting(ThreadingHTTPServer):
    """Answers after a moment, and keeps what it was asked and how many asked at once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.now = self.most = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, _Counting)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            server.bodies.append(body)
            server.now += 1
            server.most = max(server.most, server.now)
        time.sleep(0.05)
        with server.lock:
            server.now -= 1
        self.send_response(500 if body["max_tokens"] == 13 else 200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def counting() -> Iterator[_Counting]:
    server = _Counting()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def _generator(server: _Counting, **changes: Any) -> subprocess.Popen[str]:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    fields = {"sequences": 4 * GROUP, "prompt_len": 5, "completion_len": 8, "vocab": 50, "routing": {}, **changes}
    demand = msgspec.json.encode(Demand(url=url, **fields)).decode()
    command = [sys.executable, "-m", "grpo_trainer.bench.sync.generator", demand]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_the_generator_keeps_its_connections_busy(counting: _Counting) -> None:
    process = _generator(counting, routing={"policy_version": 0})
    try:
        deadline = time.monotonic() + 60
        while len(counting.bodies) < 12:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()
    assert counting.most == 4  # connections, each with 8 sequences
    body = counting.bodies[0]
    assert (body["n"], body["ignore_eos"], body["policy_version"]) == (GROUP, True, 0)
    assert len(body["prompt"]["prompt_token_ids"]) == 5 and max(body["prompt"]["prompt_token_ids"]) < 50
    # the first four end one after the other, all later ones are whole
    assert sorted(each["max_tokens"] for each in counting.bodies[:4]) == [2, 4, 6, 8]
    assert {each["max_tokens"] for each in counting.bodies[4:]} == {8}


def test_the_generator_ends_with_a_reason_when_it_is_refused(counting: _Counting) -> None:
    process = _generator(counting, sequences=GROUP, completion_len=13)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1 and "500: {}" in stderr
