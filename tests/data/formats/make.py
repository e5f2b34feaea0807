"""Write the folders of two runs: `make.py WORK OUT` runs in WORK, and copies what the runs left to OUT.

Only one process tree is killed, the one that this script started. README.md says what the folders are for.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from environments.demo_model import model as demo
from environments.demo_model.folder import Recipe
from vllm_server.protocol import machine_id

HOME = "/home/user/grpo"
"""What paths of this machine become in logs and configurations."""
TEXTS = (".log", ".toml", ".json", ".jsonl")
LEFT_OUT = ("writer.lock", "queue.sqlite.lock", "queue.sqlite-shm")
FINISHED = {"weight-bridge-mode": "lora_only", "lora-r": 8, "training-steps": 4, "trace": None}
UNFINISHED = {"weight-bridge-mode": "shared_vllm", "training-steps": 1000}
BOTH = {
    "batch-size": 16,
    "gradient-accumulation-steps": 1,
    "lr": 1e-3,
    "seq-len": 16,
    "checkpoint-interval": 3,
    "log-samples": 2,
    "server.port": 0,
    "api.port": 0,
    "server.extra-args": f"--kv-cache-memory-bytes,{16 << 20}",
    "env": "arithmetic",
    "env.low": 0,
    "env.high": 3,
    "env.group_size": 4,
}


def tiny_tokenizer() -> Qwen2Tokenizer:
    """Return the demo model's tokenizer with the 14 symbols of sums alone."""
    assert set("0123456789+=") < set(ByteLevel.alphabet())
    symbols = [demo.PAD, demo.END, *"0123456789+="]
    return Qwen2Tokenizer(
        vocab={symbol: number for number, symbol in enumerate(symbols)},
        merges=[],
        pad_token=demo.PAD,
        eos_token=demo.END,
        padding_side="left",
        model_max_length=64,
        chat_template=demo.CHAT_TEMPLATE,
    )


def tiny_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """Return a Qwen2 of 8,000 parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer.get_vocab()),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def start(run_dir: Path, options: dict[str, object]) -> subprocess.Popen[bytes]:
    words = [(f"--{key}",) if value is None else (f"--{key}", str(value)) for key, value in options.items()]
    command = [sys.executable, "-m", "grpo_trainer", "run", "--model-name", str(run_dir.parent / "model")]
    command += ["--run-dir", str(run_dir), *(word for pair in words for word in pair)]
    return subprocess.Popen(command, start_new_session=True)


def descendants(pid: int) -> list[int]:
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(each for child in children for each in descendants(child))]


def kill_between_checkpoints(run_dir: Path, process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to all processes of a run after step 5: step 3 has a checkpoint, steps 4 and 5 are lost."""
    rows = run_dir / "metrics.jsonl"
    while not rows.exists() or len(rows.read_text().splitlines()) < 5:
        assert process.poll() is None, "the run has ended"
        time.sleep(0.005)
    tree = descendants(process.pid)
    for signalled in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none sees another one's end
        for each in tree:
            os.kill(each, signalled)
    process.wait()


def copy(run_dir: Path, out: Path) -> None:
    """Copy a run's folder without locks; in texts, replace what names this machine."""
    names = {
        sys.base_prefix: "/usr",
        sys.prefix: f"{HOME}/.venv",
        str(Path(sys.executable).parents[1]): f"{HOME}/.venv",
        str(Path(torch.__file__).parents[1]): f"{HOME}/.venv/lib",
        str(run_dir.parent): HOME,
        machine_id(): "00000000-0000-0000-0000-000000000000",
    }
    for path in sorted(run_dir.rglob("*")):
        target = out / path.relative_to(run_dir)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif path.name not in LEFT_OUT:
            data = path.read_bytes()
            if path.suffix in TEXTS and "checkpoints" not in path.parts:
                for name in sorted(names, key=len, reverse=True):
                    data = data.replace(name.encode(), names[name].encode())
                data = re.sub(rf"\b{re.escape(socket.gethostname())}\b".encode(), b"host", data)
            target.write_bytes(data)
    with closing(sqlite3.connect(out / "queue.sqlite")) as queue:
        queue.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # moves the journal, of 700 kB, into the file


def main(work: Path, out: Path) -> None:
    demo.build_tokenizer, demo.build_model = tiny_tokenizer, tiny_model
    if not (work / "model").exists():
        print(demo.build(work / "model", Recipe(low=0, high=3, learning_rate=3e-3)))
    shutil.copytree(work / "model", out / "model")
    assert start(work / "finished", {**BOTH, **FINISHED}).wait() == 0
    copy(work / "finished", out / "finished")
    process = start(work / "unfinished", {**BOTH, **UNFINISHED})
    kill_between_checkpoints(work / "unfinished", process)
    copy(work / "unfinished", out / "unfinished")


if __name__ == "__main__":
    main(*(Path(word).absolute() for word in sys.argv[1:]))
