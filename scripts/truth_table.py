"""How far samples and trainer are apart: `python scripts/truth_table.py MODEL --out DIR`.

Each row starts `grpo serve` with other settings, samples, and computes the same tokens at the trainer, by the same path
as a run: |server - trainer| a token, the effective sample size of exp(trainer - server), and the share of tokens whose
weight `--is-cap` would truncate. Rows that this machine or model can't have say why.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from environments.api import intake, wire
from environments.arithmetic import ProblemSet
from environments.config import ServerConfig
from environments.peers.inference import Completion, InferenceClient, Sampling
from environments.trajectory import Trajectory, scored_group
from grpo_trainer.batch.batching import prepare
from grpo_trainer.batch.microbatches import split
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.config.train import ModelConfig, TrainConfig
from grpo_trainer.engine.forward import build_forward
from grpo_trainer.engine.routing import ROUTERS
from grpo_trainer.errors import ProcessFailedError
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.rollouts.decode import to_group
from grpo_trainer.rollouts.types import RolloutBatch

GROUP = 8
CAP = LossConfig().is_cap

HEAD = f"""\
| | mean gap, nats a token | largest | ess | share above {CAP:g} | tokens |
|---|---|---|---|---|---|"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """A way to sample, and to compute the same tokens.

    Attributes:
        flags: of the server.
        top_p: of the requests.
        masks: whether the trainer uses their sampling masks.
        replay: whether it uses the server's experts.
        needs: what the machine or the model must have: "gpu", "moe"; empty: nothing.
    """

    name: str
    flags: tuple[str, ...] = ()
    top_p: float = 1.0
    masks: bool = True
    replay: bool = False
    needs: str = ""


@dataclass(frozen=True)
class Measured:
    """Figures of a row: mean and largest |server - trainer| in nats, effective sample size, share beyond the cap."""

    row: str
    mean: float
    largest: float
    ess: float
    clipped: float
    tokens: int


EXPERTS = ("--return-routed-experts",)
ROWS = (
    Row("plain"),
    Row("top-p 0.9, with masks", top_p=0.9),
    Row("top-p 0.9, without masks", top_p=0.9, masks=False),
    Row("fp8 KV cache", ("--kv-cache-dtype", "fp8")),
    Row("fp8 weights", ("--quantization", "fp8"), needs="gpu"),
    Row("experts, without replay", EXPERTS, needs="moe"),
    Row("experts, with replay", EXPERTS, replay=True, needs="moe"),
)


@app.command()
def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model with a tokenizer that knows digits.")],
    out: Annotated[Path, typer.Option(help="Folder for the servers' logs and for truth.json.")],
    dtype: Annotated[str, typer.Option(help="Weights and activations of both sides.")] = "bfloat16",
    prompts: Annotated[int, typer.Option(help=f"Prompts, {GROUP} completions each.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a completion.")] = 64,
    rows: Annotated[str, typer.Option(help="Only rows whose names have one of these words, comma-separated.")] = "",
) -> None:
    """Measure; print and write each row when it is there."""
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
    has = {"": True, "gpu": device.type == "cuda", "moe": any(isinstance(each, ROUTERS) for each in trainer.modules())}
    tokenizer = AutoTokenizer.from_pretrained(model)
    chosen = [tokenizer(each.prompt)["input_ids"] for each in ProblemSet.of(10, 49).train[:prompts]]
    wanted = [word for word in rows.split(",") if word]
    measured: list[Measured] = []
    print(HEAD, flush=True)
    sampled: dict[tuple[object, ...], list[list[Completion]]] = {}
    for row in ROWS:
        if not has[row.needs] or (wanted and not any(word in row.name for word in wanted)):
            print(f"{row.name}: left out{'' if has[row.needs] else f', it needs {row.needs}'}", file=sys.stderr)
            continue
        key = row.flags, row.top_p
        if key not in sampled:
            sampling = Sampling(max_tokens=tokens, top_p=row.top_p)
            try:
                with server(model, dtype, row, out) as url:
                    sampled[key] = asyncio.run(sample(url, str(model), chosen, sampling))
            except ProcessFailedError as error:
                print(f"{row.name}: left out, {error}", file=sys.stderr)
                continue
        measured.append(measure(row, trainer, dtype, sampled[key]))
        print(line(measured[-1]), flush=True)
        (out / "truth.json").write_text(json.dumps([asdict(each) for each in measured], indent=1))


@contextmanager
def server(model: Path, dtype: str, row: Row, out: Path) -> Iterator[str]:
    """Yield the address of a server of the model, which ends with the block.

    Raises:
        ProcessFailedError: the server does not start with these settings on this machine.
    """
    port = claim_ports({"server": 0})["server"]
    command = [sys.executable, "-m", "vllm_server", "--model", str(model), "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", "512", "--logits-dtype", "float32", *row.flags]
    if torch.cuda.is_available():  # beside the trainer
        command += ["--gpu-memory-utilization", "0.4"]
    else:
        command += ["--kv-cache-memory-bytes", str(128 << 20)]
    url = f"http://127.0.0.1:{port}"
    spec = ProcessSpec("server", tuple(command), ready_url=f"{url}/health", stop_seconds=60.0)
    log = out / f"{row.name.replace(' ', '_')}.log"
    with OwnedServer(lambda model, version: spec, log, out / "served_model") as owned:
        owned.start(str(model), 0)
        owned.wait_ready()
        yield url


async def sample(url: str, model: str, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
    """Return the completions of each prompt, all requested at once."""
    client = InferenceClient(ServerConfig(base_url=url, model_name=model), patience=5.0)
    try:
        return list(await asyncio.gather(*(client.generate(prompt, GROUP, sampling) for prompt in prompts)))
    finally:
        await client.close()


def measure(row: Row, trainer: nn.Module, dtype: str, sampled: list[list[Completion]]) -> Measured:
    """Return the figures of a row."""
    groups = []
    for completions in sampled:
        data = scored_group([Trajectory.of(each, float(score)) for score, each in enumerate(completions)])
        kept = intake.read_one(wire.encode_group(data), wire.MSGPACK)
        groups.append(to_group(wire.decode(kept.payload, wire.PackedGroup, wire.MSGPACK)))
    loss = LossConfig(routing_replay="server" if row.replay else "off")
    forward = build_forward(
        trainer, TrainConfig(model=ModelConfig(name="m", dtype=dtype, logits_dtype="float32"), loss=loss)
    )  # pyright: ignore[reportArgumentType]
    sequences = prepare(RolloutBatch("b", tuple(groups)), loss, 512).sequences
    sequences = sequences if row.masks else tuple(replace(each, masks=None) for each in sequences)
    found = []
    with torch.no_grad():
        for microbatch in split(sequences, GROUP, packed=forward.packed):
            moved = microbatch.to(next(trainer.parameters()).device)
            found.append((forward.scores(moved).logprobs_N - moved.rollout_logprobs_N).double().cpu())
    if forward.routing is not None:
        forward.routing.remove()
    gap_N = torch.cat(found)
    w_N = gap_N.exp()
    ess = float(w_N.sum() ** 2 / (len(w_N) * w_N.square().sum()))
    gaps_N = gap_N.abs()
    return Measured(
        row.name, float(gaps_N.mean()), float(gaps_N.max()), ess, float((w_N > CAP).double().mean()), len(gap_N)
    )


def line(each: Measured) -> str:
    """Return a row of the table in Markdown."""
    return (
        f"| {each.row} | {each.mean:.2g} | {each.largest:.2g} | {each.ess:.4f} | {each.clipped:.2%} | {each.tokens} |"
    )


if __name__ == "__main__":
    app()
