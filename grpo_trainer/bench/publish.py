"""`grpo bench sync`: a weight bridge, opened as the trainer opens it, with a server and a trainer that only publishes.

The figures of a publish are the bridge's own metrics, which a run writes at each step.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
from pydantic import model_validator

from grpo_common.ports import listener
from grpo_trainer.bench.load import Demand, Meter, generating, quantile_ms
from grpo_trainer.bench.models import CACHE_BYTES_TINY, SHAPES, ModelOptions, cpu_name, ensure_model
from grpo_trainer.bench.step import StepOptions, synthetic_batch, timed_step
from grpo_trainer.config.options import build, option
from grpo_trainer.config.rules import checked
from grpo_trainer.config.server import Quantization
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError, ConfigError, ServerError
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.launch.plan import CACHE_FLAG, server_process, weight_flags
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.server_client import ServerClient
from grpo_trainer.signals import StopSignal
from vllm_server.protocol import BridgeInfo
from vllm_server.protocol.bridge_config import FILE_NAME
from vllm_server.protocol.channels import Staging, Transport, WeightTransport

if TYPE_CHECKING:
    from grpo_trainer.policy import Policy

log = logging.getLogger(__name__)

PROMPT = [2, 3, 5, 7]
MANY = 1_000_000_000
"""Steps of a training that does not end before the measurement."""
LONGEST = 2048
"""Tokens of the longest sequence that is served."""
SMALL_B = 1e-3
EARLY_PUBLISH = 10
PUBLISH_EVERY_S = 1.0
"""Seconds between publishes under load."""
PROMPT_TOKENS, COMPLETION_TOKENS = 64, 256
"""Of the sequences in flight under load."""
ROUNDS = 2
"""Base model, newest adapter, and that with publishes take turns this many times, so that drift cancels."""
SETTLE_SECONDS, SETTLE_SHARE = 4.0, 0.3
TRAINED_STEPS = 2
"""Of which the first creates the optimizer's states."""
STEP_TOKENS = (512, 1024)
"""Tokens of a prompt and of a completion in a step."""
STEP_MICROBATCH_TOKENS = 4608
PARTS: Mapping[str, tuple[str, str, str]] = {
    "lora_only": ("save_time", "load_time", "stall_time"),
    "shared_vllm": ("write_time", "pause_time", "stall_time"),
    "broadcast": ("send_time", "write_time", "stall_time"),
}
"""By bridge, the metrics `publish/…` of a publish's preparation, of the engine's part, and of the engine's pause."""


class SyncOptions(ModelOptions):
    """What is measured."""

    repeat: int = option(20, help="Measured publishes; use 1000 with --skip-load to look for leaks.", ge=1)
    log_dir: Path | None = option(None, help="Folder of the server's log (default: a temporary one).")
    bridge: Literal["lora_only", "shared_vllm", "broadcast"] = option("lora_only", help="The weight bridge.")
    share_base: bool = option(
        False, help="lora_only: use the server's base weights, as the trainer's --share-base does."
    )
    transport: Literal["auto", Transport, WeightTransport] = option(
        "auto", help="How weights go to the server, as --lora-transport or --broadcast-transport."
    )
    staging: Staging = option(
        "auto",
        help="broadcast: whether the server receives weights into a buffer while it generates, as --broadcast-staging.",
    )
    lora_r: int = option(16, help="Rank of the adapter, on all linear modules.")
    proof: bool = option(True, help="Prove the server's weights before the measurement.")
    gpu_memory_utilization: float = option(0.5, help="Share of the GPU's memory for vLLM.", gt=0, le=1)
    tensor_parallel_size: int = option(1, help="Tensor parallel size of the server.", ge=1)
    server_gpus: str | None = option(None, help="CUDA_VISIBLE_DEVICES of the server (default: as the trainer's).")
    quantization: Quantization = option("none", help="Quantisation of the server's weights; needs a GPU.")
    skip_load: bool = option(False, help="Do not measure under load.")
    concurrency: int | None = option(
        None, help="Sequences in flight, a multiple of 8 (default: 256 on a GPU, 16 on a CPU or for tiny).", ge=8
    )
    load_seconds: float = option(
        20.0, help="Seconds of each measurement: base model, adapter, adapter with publishes.", gt=0
    )
    step_seqs: int = option(
        0,
        help="After the publishes, train a step on this many synthetic sequences of 1,536 tokens, with all layers "
        "recomputed, and report the memory of trainer and server; 0: no step.",
        ge=0,
        multiple_of=8,
    )
    step_optimizer: Literal["adamw", "adamw_8bit"] = option("adamw", help="Optimizer of that step.")

    @model_validator(mode="after")
    def _can_be_measured(self) -> SyncOptions:
        if self.share_base and self.bridge != "lora_only":
            got, fix = f"--bridge {self.bridge}", "leave it out"
            raise ConfigError(field="--share-base", got=got, wanted="--bridge lora_only", fix=fix)
        return self


Publish = Mapping[str, float]
"""One publish, in seconds: `total`, `pack` (the preparation of the weights), `engine` (the engine's part), `stall` (the
engine's pause), `request` (the rest), and the bridge's own metrics, without `publish/` before their names."""


@dataclass
class Publisher:
    """A connected bridge, and a trainer that does nothing but publish."""

    options: SyncOptions
    config: TrainConfig
    policy: Policy
    bridge: Any
    client: ServerClient
    info: BridgeInfo
    check: Callable[[], None]
    """Raises an error if the server has ended by itself."""
    version: int
    """The version that was published last."""
    server_gb: float | None
    """GPU memory of the server after its start, in units of 1e9 bytes; None: there is no GPU."""

    def __post_init__(self) -> None:
        named = dict(self.policy.model.named_parameters())
        self.adapter = {name: parameter for name, parameter in named.items() if "lora_" in name}
        self.factors = [parameter.detach() for name, parameter in self.adapter.items() if "lora_B" in name]
        self.weights = [parameter.detach() for parameter in named.values()]

    def change(self) -> None:
        """Change an adapter a little; multiply all weights by one.

        The product rewrites the same bits. It reads and writes as many bytes as an optimizer's copy of new weights from
        the gradients' memory, without that memory.
        """
        import torch

        if self.options.bridge == "lora_only":
            torch._foreach_add_(self.factors, SMALL_B / 10 * (1 if self.version % 2 else -1))  # pyright: ignore[reportPrivateImportUsage]
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the optimizer's step is not what is measured
        else:
            torch._foreach_mul_(self.weights, 1.0)  # pyright: ignore[reportPrivateImportUsage]

    def write(self, change: Callable[[], object]) -> Publish:
        """Change the weights and publish them as the next version."""
        import torch

        from grpo_trainer.metrics.types import reduce

        self.version += 1
        with torch.no_grad(), self.bridge.updating():
            change()
        row = {k.removeprefix("publish/"): v for k, v in reduce(self.bridge.publish(self.version).metrics).items()}
        pack, engine, stall = (row[name] for name in PARTS[self.options.bridge])
        total = row["train/sync_time"]
        return {**row, "total": total, "pack": pack, "engine": engine, "stall": stall, "request": total - pack - engine}

    def publish(self) -> Publish:
        """Change the weights, publish them, and check that the new version answers a request.

        Raises:
            BridgeError: another version answers.
        """
        written = self.write(self.change)
        answer = self.client.generate(PROMPT, max_tokens=1, temperature=1.0, ignore_eos=True)
        if answer.policy_version != self.version:
            raise BridgeError(
                "another version answers than was published",
                field="inference server",
                got=f"{answer.model}, version {answer.policy_version}",
                wanted=f"version {self.version}",
            )
        return written

    def prove(self) -> dict[str, float] | None:
        """Prove the bridge, and return what the proof measured, in nats a token; None: it was skipped."""
        for factor in self.factors:
            factor.normal_(std=SMALL_B)  # a fresh adapter's B is 0: it would have no effect
        noise = self.bridge.prove()
        proved = getattr(self.bridge, "proved", None)
        measured = {} if noise is None else {"noise": noise} if proved is None else asdict(proved)
        return {name: float(f"{value:.3g}") for name, value in measured.items()} or None

    def warm_up(self) -> None:
        """Run the first publishes, which do additional work.

        The first load into each slot of the server is slower. Then as many versions are published as the server keeps,
        so that each later publish evicts one.
        """
        if self.options.bridge == "lora_only":
            free = self.info.max_loras - len(self.client.lora_status().versions)
            names = [f"{self.info.lora_name}-warm-{number}" for number in range(free)]
            for name in names:
                self.bridge.send(name, self.version, activate=False)
            for name in names:
                self.client.unload_adapter(name)
        for _ in range(self.info.keep_versions + 1 if self.options.bridge == "lora_only" else 3):
            self.publish()


@contextlib.contextmanager
def opened(options: SyncOptions, server_args: tuple[str, ...]) -> Iterator[Publisher]:
    """Write the model, start its server, and connect a bridge within the block.

    The model is loaded before the server starts: vLLM must not see memory come and go while it measures what is free. A
    model in the server's memory takes none, and is attached afterwards.

    Args:
        server_args: more arguments of the server.

    Raises:
        ProcessFailedError: the server did not start, or has ended; the message has its last lines.
    """
    import torch

    from grpo_trainer.optim.adamw import AdamW
    from grpo_trainer.policy import build_policy
    from grpo_trainer.saving.checkpoint import Checkpoints, Progress
    from grpo_trainer.weights.build import build_bridge

    on_gpu, stop = torch.cuda.is_available(), StopSignal()
    dtype = "bfloat16" if on_gpu else "float32"
    cache = (CACHE_FLAG, str(CACHE_BYTES_TINY)) if options.shape == "tiny" and not on_gpu else ()
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="grpo-bench-")))
        model = (options.model_dir or folder / "model").absolute()
        ensure_model(SHAPES[options.shape], model, getattr(torch, dtype))
        config = trainer_config(options, model, folder, dtype, (*cache, *server_args))
        early = None if config.shares_weights else build_policy(config)
        if on_gpu:
            torch.cuda.empty_cache()  # what loading has left is none of the server's
        before = used_gb()
        flags = weight_flags(config, folder)
        if config.shares_weights:
            flags = (*flags, "--shared-weights", "--bridge-config-path", str(folder / FILE_NAME))
        spec = server_process(config, python=sys.executable, on_gpu=on_gpu, model=config.model_name, flags=flags)
        server = held.enter_context(OwnedServer(lambda *_: spec, config.log_dir / "server.log", folder / "served"))
        server.start(config.model_name, 0)
        server.wait_ready()
        stop.watch(server.check)
        after = used_gb()
        policy = early or build_policy(config)
        trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        checkpoints = Checkpoints(config, policy, AdamW(trained, config))
        bridge = held.enter_context(build_bridge(config, policy, checkpoints, Progress(), stop))
        first = int(options.bridge == "lora_only")  # version 0 is the base model
        try:
            version = bridge.connect(first) - first
            client = ServerClient(config.server)
            server_gb = None if after is None or before is None else after - before
            info = client.wait_until_ready()
            yield Publisher(options, config, policy, bridge, client, info, stop.check, version, server_gb)
        except ServerError:
            server.check()  # of a server that has ended, the last lines are the error
            raise


def trainer_config(
    options: SyncOptions, model: Path, folder: Path, dtype: str, server_args: tuple[str, ...]
) -> TrainConfig:
    """Return the trainer's configuration.

    Args:
        folder: folder of all written files; deleted after the measurement.
        server_args: more arguments of the server.
    """
    training = {
        "batch_size": 8,
        "gradient_accumulation_steps": options.step_seqs // 8,
        "max_tokens_per_microbatch": STEP_MICROBATCH_TOKENS,
        "optimizer": options.step_optimizer,
        "gradient_checkpointing": True,
        "drift_limit": 0,
    }
    of_bridge: dict[str, dict[str, Any]] = {
        "lora_only": {
            "lora_transport": options.transport,
            "lora_r": options.lora_r,
            "lora_alpha": 2.0 * options.lora_r,
            "lora_root": folder / "adapters",
            "share_base": options.share_base,
        },
        "broadcast": {"broadcast_transport": options.transport, "broadcast_staging": options.staging},
    }
    alike = {"proof", "gpu_memory_utilization", "tensor_parallel_size", "quantization"}
    values = {
        **options.model_dump(include=alike),
        **(training if options.step_seqs else {}),
        "model": str(model),
        "dtype": dtype,
        "compile": "off",
        "seq_len": LONGEST,
        "max_model_len": LONGEST,
        "training_steps": MANY,
        "save_path": folder / "written",
        "log_dir": options.log_dir or folder,
        "weight_bridge_mode": options.bridge,
        "vllm_port": claim_ports({"server": 0})["server"],
        "vllm_gpus": options.server_gpus,
        **of_bridge.get(options.bridge, {}),
    }
    config = checked(build(TrainConfig, {name: value for name, value in values.items() if value is not None}))
    return config.model_copy(update={"server": config.server.model_copy(update={"extra_args": server_args})})


def used_gb() -> float | None:
    """Return what all processes use on the trainer's GPU, in units of 1e9 bytes; None: there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 1e9, 4)


def measure(options: SyncOptions, server_args: tuple[str, ...]) -> dict[str, Any]:
    """Start a server, publish to it, load it, and end it; return the figures.

    Raises:
        GrpoError: the server did not start, the bridge failed its proof, …
    """
    import torch

    with opened(options, server_args) as publisher:
        on_gpu, info = torch.cuda.is_available(), publisher.info
        proof = publisher.prove()
        publisher.warm_up()
        publishes: list[Publish] = []
        early: dict[str, float | None] = {}
        for number in range(1, options.repeat + 1):
            publishes.append(publisher.publish())
            if number == min(EARLY_PUBLISH, options.repeat):
                early = _snapshot(publisher)
        late = _snapshot(publisher)
        quiet = publish_figures(publishes)
        log.info("publish: median %.1f ms, 95th percentile %.1f ms", quiet["publish_p50_ms"], quiet["publish_p95_ms"])
        base = [parameter for name, parameter in publisher.policy.model.named_parameters() if ".lora_" not in name]
        return {
            **options.model_dump(include={"bridge", "shape", "share_base", "repeat"}),
            "lora_r": options.lora_r if options.bridge == "lora_only" else None,
            "dtype": info.dtype.removeprefix("torch."),
            "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
            "server_workers": len(info.workers),
            "versions": {"vllm": info.vllm_version, "torch": torch.__version__, "python": platform.python_version()},
            "proof": proof,
            "model_gb": round(sum(parameter.numel() for parameter in base) * _itemsize(info.dtype) / 1e9, 4),
            **_bridge_facts(publisher, publishes),
            **quiet,
            "load": None if options.skip_load else load_figures(publisher),
            "memory": {
                "gpu_total_gb": used_gb(),
                "trainer_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if on_gpu else None,
                # After the 10th and after the last publish without load, which shows leaks.
                **{f"flat_{name}": None if value is None else (value, late[name]) for name, value in early.items()},
            },
            "step": step_figures(publisher) if options.step_seqs else None,
        }


def publish_figures(publishes: Sequence[Publish]) -> dict[str, Any]:
    """Return medians and 95th percentiles of publishes on an idle server; each publish's phases add up to it."""
    return {
        "publish_p50_ms": _ms(publishes, "total"),
        "publish_p95_ms": _ms(publishes, "total", 0.95),
        "stall_ms": _ms(publishes, "stall"),
        "stall_p95_ms": _ms(publishes, "stall", 0.95),
        "phases": {f"{name}_ms": _ms(publishes, name) for name in ("pack", "request", "engine")},
    }


def _ms(publishes: Sequence[Publish], name: str, share: float = 0.5) -> float:
    return quantile_ms([publish[name] for publish in publishes], share)


def _itemsize(dtype: str) -> int:
    import torch

    return getattr(torch, dtype.removeprefix("torch.")).itemsize


def _bridge_facts(publisher: Publisher, publishes: Sequence[Publish]) -> dict[str, Any]:
    """Return the figures that only one bridge has."""
    if publisher.options.bridge == "shared_vllm":
        return {"write_ms": _ms(publishes, "write_time"), "pause_ms": _ms(publishes, "pause_time")}
    channel, info = publisher.bridge.channel, publisher.info
    if publisher.options.bridge == "lora_only":
        nbytes = sum(each.numel() for each in publisher.adapter.values()) * _itemsize(info.lora_dtype or info.dtype)
        return {"transport": channel.name, "adapter_mb": round(nbytes / 1e6, 3)}
    gigabytes = publisher.bridge.layout.nbytes / 1e9
    speed = gigabytes / statistics.median(each["total"] for each in publishes)
    staged = channel.staging_bytes > 0
    return {"transport": channel.name, "staged": staged, "weights_gb": round(gigabytes, 4), "gb_per_s": round(speed, 2)}


def _snapshot(publisher: Publisher) -> dict[str, float | None]:
    """Return what trainer and server hold now. Sizes in units of 1e6 bytes; the server's are of all its processes."""
    server = listener(publisher.config.server.port)
    assert server is not None
    rss = open_files = 0
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has ended since it was listed
            rss += process.memory_info().rss
            open_files += process.num_fds()
    config, on_gpu = publisher.config, used_gb()
    written = config.lora_root if config.weight_bridge_mode == "lora_only" else config.save_path
    return {
        "server_rss_mb": round(rss / 1e6, 1),
        "server_open_files": open_files,
        "trainer_rss_mb": round(psutil.Process().memory_info().rss / 1e6, 1),
        "gpu_mb": None if on_gpu is None else round(on_gpu * 1e3, 1),
        "adapters": len(publisher.client.lora_status().versions),
        "files": sum(1 for path in Path(written or "").rglob("*") if path.is_file()),
    }


def load_figures(publisher: Publisher) -> dict[str, float | int]:
    """Return tokens per second under load, without and with publishes, and the duration of publishes under load.

    Tokens are those that the server's own counter has at a window's ends; a window's first seconds are not counted.
    """
    import torch

    options, url = publisher.options, publisher.config.server.url
    on_gpu = torch.cuda.is_available() and options.shape != "tiny"
    meter, sequences = Meter(url), options.concurrency or (256 if on_gpu else 16)
    base = {"policy_version": 0} if options.bridge == "lora_only" else {}
    publishes: list[Publish] = []
    tokens, seconds = [0.0] * 3, [0.0] * 3

    def until(end: float, *, publishing: bool) -> None:
        """Publish one version at a time, at a fixed rate, or as fast as possible if publishes take longer."""
        due = time.perf_counter()
        while publishing and due < end:
            time.sleep(max(0.0, due - time.perf_counter()))
            publishes.append(publisher.publish())
            due = max(due + PUBLISH_EVERY_S, time.perf_counter())
        time.sleep(max(0.0, end - time.perf_counter()))

    vocab, window = SHAPES[options.shape].vocab, options.load_seconds / ROUNDS
    for turn in [*range(3)] * ROUNDS:  # base model, adapter, adapter with publishes
        demand = Demand(url, sequences, PROMPT_TOKENS, COMPLETION_TOKENS, vocab, base if turn == 0 else {})
        with generating(demand, publisher.config.log_dir / "load.log", meter):
            start = time.perf_counter()
            until(start + min(SETTLE_SECONDS, SETTLE_SHARE * window), publishing=turn == 2)
            before, began = meter.generated()
            until(start + window, publishing=turn == 2)
            after, ended = meter.generated()
        publisher.check()
        tokens[turn] += after - before
        seconds[turn] += ended - began
    rates = [each / taken for each, taken in zip(tokens, seconds, strict=True)]
    return {
        "requests": sequences,
        "base_tokens_per_s": round(rates[0], 1),
        "lora_tokens_per_s": round(rates[1], 1),
        "publishing_tokens_per_s": round(rates[2], 1),
        "lora_over_base": round(rates[1] / rates[0], 4),
        "publishing_over_lora": round(rates[2] / rates[1], 4),
        "publishes_under_load": len(publishes),
        "publish_under_load_p50_ms": _ms(publishes, "total"),
        "publish_under_load_p95_ms": _ms(publishes, "total", 0.95),
        "stall_under_load_p50_ms": _ms(publishes, "stall"),
        "stall_under_load_p95_ms": _ms(publishes, "stall", 0.95),
    }


def step_figures(publisher: Publisher) -> dict[str, Any]:
    """Train on synthetic rollouts, twice. Sizes are in units of 1e9 bytes, None without a GPU.

    * `seconds`: of the last step;
    * `peak_gb`: the most that the trainer had allocated at one time: weights, gradients, states, activations;
    * `server_gb`: taken by the server alone; `together_gb`: used on the GPU after the steps, by all processes.
    """
    import torch

    from grpo_trainer.trainer import Trainer

    options, on_gpu = publisher.options, torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(publisher.policy.model, publisher.config)
    prompt, completion = STEP_TOKENS
    work = StepOptions(shape=options.shape, seqs=options.step_seqs, prompt_len=prompt, completion_len=completion)
    seconds, row = 0.0, {}
    for number in range(TRAINED_STEPS):
        seconds, row = timed_step(trainer, synthetic_batch(work, number), number, publisher.bridge.updating)
        if options.bridge == "shared_vllm":
            publisher.version += 1
            publisher.bridge.publish(publisher.version)
    return {
        "sequences": options.step_seqs,
        "optimizer": options.step_optimizer,
        "seconds": round(seconds, 3),
        "loss": row["train/loss"],
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if on_gpu else None,
        "server_gb": publisher.server_gb,
        "together_gb": used_gb(),
    }
