"""Small runs of `grpo run` for tests: their commands, their metrics, their ends."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.processes import GPU_SHARE, assert_ended, running, tail, wait_for

KV_CACHE = f"--kv-cache-memory-bytes,{64 << 20}"
OF_MODE: dict[str, dict[str, object]] = {
    "lora_only": {},
    "shared_vllm": {"lora-r": None, "lr": 1e-4},
    "broadcast": {"lora-r": None, "lr": 1e-4},
    "lora_restart": {"vllm-restart-interval": 2},
    "none": {"lora-r": None, "lr": 1e-4, "vllm-restart-interval": 2},
}


def of_mode(mode: str, **others: object) -> dict[str, Any]:
    """Options of a small run in one mode."""
    return {"weight-bridge-mode": mode, "server.extra-args": KV_CACHE, **OF_MODE[mode], **others}


def flags(options: Mapping[str, object]) -> list[str]:
    """Options as words: True is a flag alone, and None leaves an option out."""
    given = [(f"--{name}", value) for name, value in options.items() if value is not None]
    return [word for name, value in given for word in ((name,) if value is True else (name, str(value)))]


def arguments(model: Path, run_dir: Path, **options: object) -> list[str]:
    settings: dict[str, object] = {
        "model-name": model,
        "run-dir": run_dir,
        "weight-bridge-mode": "lora_only",
        "training-steps": 3,
        "batch-size": 32,
        "gradient-accumulation-steps": 1,
        "lr": 1e-3,
        "lora-r": 8,
        "seq-len": 64,
        "checkpoint-interval": 1,
        "server.port": 0,
        "server.gpu-memory-utilization": GPU_SHARE,
        "api.port": 0,
        **{name.replace("_", "-").replace("--", "."): value for name, value in options.items()},
    }
    return ["-m", "grpo_trainer", "run", *flags(settings)]


@contextmanager
def started(model: Path, run_dir: Path, log: Path, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    with running(*arguments(model, run_dir, **options), log=log) as process:
        yield process


def trained(
    model: Path, run_dir: Path, *, seconds: float = 400, variables: dict[str, str] | None = None, **options: object
) -> list[dict[str, Any]]:
    """Run to the end, with the log beside the run's folder; return the metrics of each step."""
    log = run_dir.with_name("log")
    with running(*arguments(model, run_dir, **options), log=log, env=variables) as process:
        assert finished(process, log, seconds) == 0, tail(log)
    return rows(run_dir)


def jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a file that may be being written: the last line may not be whole yet."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    return jsonl(run_dir / "metrics.jsonl")


def assert_fresh(done: Sequence[Mapping[str, Any]]) -> None:
    """Whichever server generated the samples of a step, their logprobs are those of the trainer's weights."""
    fresh = [row for row in done if row.get("rollout/staleness_max") == 0]
    gaps = [row["alignment/logprob_diff_max"] for row in fresh if "alignment/logprob_diff_max" in row]
    assert gaps and max(gaps) < 1e-3


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes], log: Path) -> None:
    wait_for(
        f"step {step}",
        lambda: process.poll() is not None or any(row["step"] >= step for row in rows(run_dir)),
        log,
        300,
    )
    assert process.poll() is None or rows(run_dir)[-1]["step"] >= step, tail(log)


def finished(process: subprocess.Popen[bytes], log: Path, seconds: float = 300) -> int:
    wait_for("the run is over", lambda: process.poll() is not None, log, seconds)
    return process.wait()


def family_until_the_end(process: subprocess.Popen[bytes], log: Path) -> set[int]:
    """Wait until a run is over. Returns its processes that were seen, also those that it ended before."""
    members, run = set[int](), psutil.Process(process.pid)

    def is_over() -> bool:
        with suppress(psutil.NoSuchProcess):
            members.update(child.pid for child in run.children(recursive=True))
        return process.poll() is not None

    wait_for("the run is over", is_over, log, 400, every=0.5)
    return members


def member(process: subprocess.Popen[bytes], module: str) -> int:
    """The process of the run that runs a module."""
    (pid,) = [
        child.pid for child in psutil.Process(process.pid).children() if f"-m {module}" in " ".join(child.cmdline())
    ]
    return pid


def newest(run_dir: Path) -> int:
    """The step of the newest whole checkpoint of a run or a trainer, whose thread writes them; 0 without one."""
    states = [*run_dir.glob("*/state.json"), *run_dir.glob("checkpoints/*/state.json")]
    names = [re.fullmatch(r"(?:adapter_)?step_(\d+)", path.parent.name) for path in states]  # others are not whole
    return max((int(name[1]) for name in names if name), default=0)


def assert_ended_with(log: Path, pattern: str, members: Iterable[int], run_dir: Path) -> None:
    """A run says at its end why, in one message without a traceback; nothing of it is left."""
    said = log.read_text()
    assert said.count("\ngrpo: ") == 1 and "Traceback" not in said, tail(log)
    assert re.search(pattern, said.partition("\ngrpo: ")[2], re.MULTILINE | re.IGNORECASE | re.DOTALL), tail(log)
    assert_ended(members, log)
    assert not list(run_dir.rglob(".*.tmp")), "a half-written file"


def check_format(events: Sequence[Mapping[str, Any]]) -> None:
    """Each event of a timeline has what its phase needs, and each asynchronous stage that began has ended.

    Perfetto's importer of Chrome's JSON asks that ("Trace Event Format", Google, sections on phases).
    """
    open_stages: Counter[tuple[int, str, str]] = Counter()
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["name"], str), event
        match event["ph"]:
            case "M":
                assert event["name"] in {"process_name", "process_sort_index"} and event["args"], event
            case "X":
                assert event["dur"] >= 0 and event["ts"] >= 0 and isinstance(event["tid"], int), event
            case "b" | "e" as phase:
                assert event["cat"] and event["ts"] >= 0, event
                open_stages[event["pid"], event["name"], event["id2"]["local"]] += 1 if phase == "b" else -1
            case phase:
                raise AssertionError(f"phase {phase}")
    assert not +open_stages and not -open_stages
