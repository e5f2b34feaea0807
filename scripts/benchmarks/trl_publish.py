"""TRL's server mode sends all weights: `python scripts/benchmarks/trl_publish.py --shape 7b --model-dir /tmp/m7b`.

TRL's own client sends a model from the first GPU, by NCCL, to a vLLM server on the second one, as GRPOTrainer does
before it generates: one update with all parameters, then the prefix cache is emptied. The server has the command line
of `trl vllm-serve`, and generates nothing during a publish. The trainer's weights are sent in bfloat16, then in
float32, which is GRPOTrainer's default. Prints one JSON line, to compare with
`grpo bench sync --bridge broadcast --transport nccl --server-gpus 1`.

Needs two GPUs, `pip install --no-deps trl==1.16.0`, what TRL needs (accelerate, datasets), and a vLLM that it supports
(0.22 to 0.31).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from grpo_trainer.bench.load import quantile_ms
from grpo_trainer.bench.models import SHAPES, ensure_model, random_model
from grpo_trainer.errors import BridgeError, ConfigError
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.ports import claim_ports

HOST = "127.0.0.1"
WARM_UP = 16
"""Publishes that are not counted. In vLLM 0.25 each publish uses two of PyTorch's 32 streams on both sides, in turn.
Each stream allocates memory when it is first used. (vLLM 0.32 always uses the same two.)"""


def publish_figures(client: Any, model: torch.nn.Module, repeat: int) -> dict[str, Any]:
    """Send all weights as GRPOTrainer does, and return the times of the counted publishes, and of all in `all_ms`."""
    params = dict(model.named_parameters())
    metadata = [(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in params.items()]
    seconds: list[float] = []
    for _ in range(WARM_UP + repeat):
        torch.cuda.synchronize()
        began = time.perf_counter()
        client.update_named_params(metadata, ((name, each.data) for name, each in params.items()))
        client.reset_prefix_cache()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    counted = seconds[WARM_UP:]
    sent = sum(each.nbytes for each in params.values()) / 1e9
    return {
        "gb": round(sent, 2),
        "publish_p50_ms": quantile_ms(counted),
        "publish_p95_ms": quantile_ms(counted, 0.95),
        "gb_per_s": round(sent / quantile_ms(counted) * 1e3, 1),
        "all_ms": [round(each * 1e3, 1) for each in seconds],
    }


def main(
    model_dir: Annotated[Path, typer.Option(help="Folder of the model with random weights; written if it is new.")],
    shape: Annotated[str, typer.Option(help="Shape of the model.")] = "7b",
    repeat: Annotated[int, typer.Option(help=f"Publishes of each dtype, after {WARM_UP} that warm up.")] = 20,
    log_dir: Annotated[Path | None, typer.Option(help="Folder of the server's log (default: a temporary one).")] = None,
) -> None:
    """Measure how long TRL's server mode takes to send all weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_HOST_IP", HOST)  # where the two sides meet
    from trl.generation.vllm_client import VLLMClient  # pyright: ignore[reportMissingImports]
    from trl.scripts.vllm_serve import ScriptArguments, build_command  # pyright: ignore[reportMissingImports]

    if torch.cuda.device_count() < 2:
        raise ConfigError(field="GPUs", got=torch.cuda.device_count(), wanted="two, one for the server")
    ensure_model(SHAPES[shape], model_dir, torch.bfloat16)
    ports = claim_ports({"server": 0, "group": 0})
    serve = ScriptArguments(str(model_dir), host=HOST, port=ports["server"], max_model_len=2048)
    serve.gpu_memory_utilization = 0.5  # as in `grpo bench sync`; the rest is free for what is received
    env = {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1],
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",  # importing TRL has set ERROR
    }
    url = f"http://{HOST}:{ports['server']}"
    spec = ProcessSpec("server", tuple(build_command(serve)), env, f"{url}/health", ready_timeout=300, stop_seconds=30)
    figures: dict[str, Any] = {"shape": shape, "device": torch.cuda.get_device_name()}
    figures |= {name: version(name) for name in ("trl", "vllm", "torch")}
    with (
        tempfile.TemporaryDirectory() as folder,
        OwnedServer(lambda *_: spec, (log_dir or Path(folder)) / "server.log", Path(folder) / "served") as server,
    ):
        server.start(str(model_dir), 0)
        model: Any = random_model(SHAPES[shape], torch.bfloat16, torch.device("cuda", 0), seed=1)
        server.wait_ready()
        client = VLLMClient(url, group_port=ports["group"])
        client.init_communicator(device=0)
        ask = partial(client.generate, [[2, 3, 5, 7]], generation_kwargs={"seed": 0})
        before = ask()["completion_ids"]
        for dtype in ("bfloat16", "float32"):
            model.to(getattr(torch, dtype))
            torch.cuda.empty_cache()
            figures[dtype] = publish_figures(client, model, repeat)
        if ask()["completion_ids"] == before:
            raise BridgeError("the server answers as before it got other weights", got=before)
        client.close_communicator()
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
