"""TRL's server mode sends all weights: `python scripts/bench_trl.py --publish --shape 7b --model-dir /tmp/m7b`.

TRL's own client sends a model in bfloat16 from the first GPU, by NCCL, to a vLLM server on the second one, as
GRPOTrainer does before it generates: one update with all parameters, then the prefix cache is emptied. The server is
the one that `trl vllm-serve` starts. Nothing generates meanwhile. Prints one JSON line, to compare with
`grpo bench sync --bridge broadcast --transport nccl --server-gpus 1`.

Not run yet. Needs `pip install --no-deps trl==1.16.0` and what TRL needs (accelerate, datasets).
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from grpo_trainer.bench.random_model import ensure_model, random_model
from grpo_trainer.bench.shapes import SHAPES

START_SECONDS, STOP_SECONDS = 300, 30


def main(
    model_dir: Annotated[Path, typer.Option(help="Folder of the model with random weights; written if it is new.")],
    shape: Annotated[str, typer.Option(help="Shape of the model.")] = "7b",
    repeat: Annotated[int, typer.Option(help="Publishes, after one that warms up.")] = 10,
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8047,
    publish: Annotated[bool, typer.Option("--publish", hidden=True)] = False,
) -> None:
    """Measure how long TRL's server mode takes to send all weights."""
    from trl.generation.vllm_client import VLLMClient
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    ensure_model(SHAPES[shape], model_dir, torch.bfloat16)
    serve = build_command(ScriptArguments(model=str(model_dir), port=port, max_model_len=2048))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "1", "VLLM_SERVER_DEV_MODE": "1"}
    server = subprocess.Popen(serve, env=env, stdout=sys.stderr, start_new_session=True)
    try:
        model = random_model(SHAPES[shape], torch.bfloat16, torch.device("cuda", 0))
        client = VLLMClient(host="127.0.0.1", server_port=port, connection_timeout=START_SECONDS)
        client.init_communicator(device=0)
        metadata = [(name, "bfloat16", list(param.shape)) for name, param in model.named_parameters()]
        seconds = []
        for _ in range(1 + repeat):
            torch.cuda.synchronize()
            began = time.perf_counter()
            client.update_named_params(metadata, ((name, param.data) for name, param in model.named_parameters()))
            client.reset_prefix_cache()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        client.close_communicator()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    sent = sum(param.numel() * param.element_size() for param in model.parameters())
    median = statistics.median(seconds[1:])
    figures = {
        "shape": shape,
        "gb": round(sent / 1e9, 2),
        "publish_ms_p50": round(1000 * median, 1),
        "publish_ms": [round(1000 * each, 1) for each in seconds[1:]],
        "gb_per_s": round(sent / 1e9 / median, 1),
    }
    print(json.dumps(figures))
