"""`grpo bench sync`: a weight bridge, opened as the trainer opens it, with a server and a trainer that only publishes.

The figures of a publish are the bridge's own metrics, which a run writes at each step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import psutil
from pydantic import model_validator

from grpo_common.ports import listener
from grpo_trainer.bench.load import Demand, Meter, generating, quantile_ms
from grpo_trainer.bench.models import CACHE_BYTES_TINY, SHAPES, ModelOptions, cpu_name, ensure_model, gpus_used_mb
from grpo_trainer.bench.step import StepOptions, synthetic_batch, timed_step
from grpo_trainer.config.options import build, option
from grpo_trainer.config.rules import checked
from grpo_trainer.config.server import KvCacheDtype, Quantization
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError, ConfigError, ServerError
from grpo_trainer.launch.owned_server import OwnedServer
from grpo_trainer.launch.plan import CACHE_FLAG, ProcessSpec, server_process, weight_flags
from grpo_trainer.launch.ports import claim_ports
from grpo_trainer.server_client import ServerClient
from grpo_trainer.signals import StopSignal
from vllm_server.protocol import BridgeInfo
from vllm_server.protocol.bridge_config import FILE_NAME
from vllm_server.protocol.channels import Staging, Transport, WeightTransport

if TYPE_CHECKING:
    import torch

    from grpo_trainer.policy import Policy

log = logging.getLogger(__name__)

PROMPT = [2, 3, 5, 7]
MANY = 1_000_000_000
"""Steps of a training that does not end before the measurement: after the last one no server is started again."""
SMALL_B = 1e-3
EARLY_PUBLISH = 10
ROUNDS = 2
"""Base model, newest adapter, and that with publishes take turns this many times, so that drift cancels."""
SETTLE_SECONDS, SETTLE_SHARE = 4.0, 0.3
TRAINED_STEPS = 2
"""Of which the first creates the optimizer's states."""
PARTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "lora_only": (("save_time",), ("load_time",), ("stall_time",)),
    "shared_vllm": (("write_time",), ("pause_time",), ("stall_time",)),
    "broadcast": (("send_time",), ("write_time",), ("stall_time",)),
    "none": (("save_time",), ("stop_time", "start_time"), ("stop_time", "start_time")),
}
"""By bridge, the metrics `publish/…` of a publish's preparation, of the engine's part, and of the engine's pause."""


class SyncOptions(ModelOptions):
    """What is measured."""

    repeat: int = option(20, help="Measured publishes; use 1000 with --skip-load to look for leaks.", ge=1)
    baseline_repeat: int = option(
        10,
        help="Measured loads by vLLM's /v1/load_lora_adapter; fewer than the adapters that the server "
        "can hold (--keep-versions + 4); 0: none.",
        ge=0,
    )
    log_dir: Path | None = option(None, help="Folder of the server's log (default: a temporary one).")
    bridge: Literal["lora_only", "shared_vllm", "broadcast", "none"] = option(
        "lora_only", help="The weight bridge; none restarts the server at each publish, and --repeat 3 is enough."
    )
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
    lora_root: Path | None = option(
        None, help="Folder of --transport disk and of the baseline, e.g. /dev/shm (default: a temporary one)."
    )
    keep_versions: int = option(4, help="Versions that stay loaded in the server.", ge=2)
    proof: bool = option(True, help="Prove the server's weights before the measurement.")
    max_model_len: int = option(2048, help="Longest sequence served.", gt=1)
    gpu_memory_utilization: float = option(0.5, help="Share of the GPU's memory for vLLM.", gt=0, le=1)
    tensor_parallel_size: int = option(1, help="Tensor parallel size of the server.", ge=1)
    server_gpus: str | None = option(None, help="CUDA_VISIBLE_DEVICES of the server (default: as the trainer's).")
    enforce_eager: bool = option(False, help="Disable CUDA graphs; generation is several times slower.")
    quantization: Quantization = option("none", help="Quantisation of the server's weights; needs a GPU.")
    kv_cache_dtype: KvCacheDtype = option("auto", help="Dtype of the server's KV cache.")
    skip_load: bool = option(False, help="Do not measure under load.")
    concurrency: int | None = option(
        None, help="Sequences in flight, a multiple of 8 (default: 256 on a GPU, 16 on a CPU or for tiny).", ge=8
    )
    prompt_len: int = option(64, help="Tokens of a prompt.", ge=1)
    completion_len: int = option(256, help="Tokens of a completion.", ge=1)
    load_seconds: float = option(
        20.0, help="Seconds of each measurement: base model, adapter, adapter with publishes.", gt=0
    )
    publish_interval: float = option(1.0, help="Seconds between publishes under load.", gt=0)
    step_seqs: int = option(
        0,
        help="After the publishes, train a step on this many synthetic sequences, with all layers recomputed, and "
        "report the memory of trainer and server; 0: no step.",
        ge=0,
        multiple_of=8,
    )
    step_prompt_len: int = option(512, help="Tokens of a prompt in that step.", ge=1)
    step_completion_len: int = option(1024, help="Tokens of a completion in that step.", ge=1)
    step_optimizer: Literal["adamw", "adamw_8bit"] = option("adamw", help="Optimizer of that step.")
    step_microbatch_tokens: int = option(4608, help="Tokens of a microbatch in that step.", ge=1)

    @model_validator(mode="after")
    def _can_be_measured(self) -> SyncOptions:
        if self.share_base and self.bridge != "lora_only":
            got, fix = f"--bridge {self.bridge}", "leave it out"
            raise ConfigError(field="--share-base", got=got, wanted="--bridge lora_only", fix=fix)
        longest = self.step_prompt_len + self.step_completion_len
        if self.step_seqs and longest > self.max_model_len:
            raise ConfigError(
                field="--step-prompt-len and --step-completion-len",
                got=f"{longest} tokens together",
                wanted=f"at most --max-model-len {self.max_model_len}",
                fix="raise that or shorten these",
            )
        return self

    @property
    def in_flight(self) -> int:
        """Sequences in flight under load."""
        import torch

        return self.concurrency or (256 if torch.cuda.is_available() and self.shape != "tiny" else 16)


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
    server_mb: float | None
    """GPU memory of the server after its start, in units of 1e6 bytes; None: there is no GPU."""
    loaded: Mapping[str, float | None]
    """What it took to load the policy, see `opened`."""

    def __post_init__(self) -> None:
        named = dict(self.policy.model.named_parameters())
        self.adapter = {name: parameter for name, parameter in named.items() if "lora_" in name}
        self.factors = [parameter.detach() for name, parameter in self.adapter.items() if "lora_B" in name]
        self.weights = [parameter.detach() for parameter in named.values()]

    @property
    def adapter_dtype(self) -> torch.dtype:
        """The dtype in which the server holds adapters."""
        import torch

        return getattr(torch, (self.info.lora_dtype or self.info.dtype).removeprefix("torch."))

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
        elif self.options.bridge != "none":
            torch._foreach_mul_(self.weights, 1.0)  # pyright: ignore[reportPrivateImportUsage]

    def write(self, change: Callable[[], object]) -> Publish:
        """Change the weights and publish them as the next version."""
        import torch

        from grpo_trainer.metrics.types import reduce

        self.version += 1
        with torch.no_grad(), self.bridge.updating():
            change()
        row = {k.removeprefix("publish/"): v for k, v in reduce(self.bridge.publish(self.version).metrics).items()}
        pack, engine, stall = (sum(row[name] for name in names) for names in PARTS[self.options.bridge])
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
        for _ in range({"lora_only": self.info.keep_versions + 1, "none": 0}.get(self.options.bridge, 3)):
            self.publish()


@contextlib.contextmanager
def opened(options: SyncOptions, server_args: tuple[str, ...]) -> Iterator[Publisher]:
    """Write the model, start its server, and connect a bridge within the block.

    The model is loaded before the server starts: vLLM must not see memory come and go while it measures what is free. A
    model in the server's memory takes none, and is attached afterwards. `loaded` has, in units of 1e9 bytes unless a
    name says otherwise: `attach_ms` (None: nothing is attached), `model_gb` (the weights in the server's dtype, without
    an adapter), `trainer_extra_gb` (GPU memory for loading; None: there is no GPU).

    Args:
        server_args: more arguments of the server.
    """
    import torch

    from grpo_trainer.optim.adamw import AdamW
    from grpo_trainer.policy import build_policy
    from grpo_trainer.saving.checkpoint import Checkpoints, Progress
    from grpo_trainer.weights.build import build_bridge

    on_gpu, stop = torch.cuda.is_available(), StopSignal()
    dtype = "bfloat16" if on_gpu else "float32"
    cache = (CACHE_FLAG, str(CACHE_BYTES_TINY)) if options.shape == "tiny" and not on_gpu else ()

    def load() -> tuple[Policy, dict[str, float | None]]:
        before, started = torch.cuda.memory_allocated() if on_gpu else 0, time.perf_counter()
        policy = build_policy(config)
        milliseconds = (time.perf_counter() - started) * 1e3
        base = [parameter for name, parameter in policy.model.named_parameters() if ".lora_" not in name]
        served = sum(parameter.numel() for parameter in base) * getattr(torch, dtype).itemsize
        return policy, {
            "attach_ms": round(milliseconds, 1) if config.shares_weights else None,
            "model_gb": round(served / 1e9, 4),
            "trainer_extra_gb": round((torch.cuda.memory_allocated() - before) / 1e9, 4) if on_gpu else None,
        }

    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="grpo-bench-")))
        root = (options.lora_root or folder).absolute()
        root.mkdir(parents=True, exist_ok=True)
        adapters = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="grpo-adapters-", dir=root)))
        model = (options.model_dir or folder / "model").absolute()
        ensure_model(SHAPES[options.shape], model, getattr(torch, dtype))
        config = trainer_config(options, model, folder, adapters, dtype, (*cache, *server_args))
        early = None if config.shares_weights else load()
        if on_gpu:
            torch.cuda.empty_cache()  # what loading has left is none of the server's
        before, server_mb = used_mb(options), None
        if not config.owns_server:
            held.enter_context(_serving(config, folder, stop, on_gpu=on_gpu))
            server_mb = _since(before, options)
        policy, loaded = early or load()
        trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        checkpoints = Checkpoints(config, policy, AdamW(trained, config))
        bridge = held.enter_context(build_bridge(config, policy, checkpoints, Progress(), stop))
        first = int(options.bridge == "lora_only")  # version 0 is the base model
        version = bridge.connect(first) - first
        server_mb = _since(before, options) if config.owns_server else server_mb
        client = ServerClient(config.server)
        info = client.wait_until_ready()
        yield Publisher(options, config, policy, bridge, client, info, stop.check, version, server_mb, loaded)


def trainer_config(
    options: SyncOptions, model: Path, folder: Path, adapters: Path, dtype: str, server_args: tuple[str, ...]
) -> TrainConfig:
    """Return the trainer's configuration.

    Args:
        folder: folder of all written files but `adapters`; deleted after the measurement.
        server_args: more arguments of the server.
    """
    training = {
        "batch_size": 8,
        "gradient_accumulation_steps": options.step_seqs // 8,
        "max_tokens_per_microbatch": options.step_microbatch_tokens,
        "optimizer": options.step_optimizer,
        "gradient_checkpointing": True,
        "drift_limit": 0,
    }
    of_bridge: dict[str, dict[str, Any]] = {
        "lora_only": {
            "lora_transport": options.transport,
            "lora_r": options.lora_r,
            "lora_alpha": 2.0 * options.lora_r,
            "lora_keep_versions": options.keep_versions,
            "lora_root": adapters,
            "share_base": options.share_base,
        },
        "broadcast": {
            "broadcast_transport": options.transport,
            "broadcast_staging": options.staging,
            "broadcast_root": options.lora_root,
        },
        "none": {"vllm_restart_interval": 1},
    }
    alike = {"proof", "max_model_len", "gpu_memory_utilization", "tensor_parallel_size", "quantization"}
    values = {
        **options.model_dump(include={*alike, "kv_cache_dtype"}),
        **(training if options.step_seqs else {}),
        "model": str(model),
        "dtype": dtype,
        "compile": "off",
        "seq_len": options.max_model_len,
        "training_steps": MANY,
        "save_path": folder / "written",
        "keep_checkpoints": 1,
        "log_dir": options.log_dir or folder,
        "weight_bridge_mode": options.bridge,
        "vllm_port": claim_ports({"server": 0})["server"],
        "vllm_enforce_eager": options.enforce_eager,
        "vllm_gpus": options.server_gpus,
        **of_bridge.get(options.bridge, {}),
    }
    config = checked(build(TrainConfig, {name: value for name, value in values.items() if value is not None}))
    return config.model_copy(update={"server": config.server.model_copy(update={"extra_args": server_args})})


def server_spec(config: TrainConfig, folder: Path, *, on_gpu: bool) -> ProcessSpec:
    """Return the process of a server that outlives publishes, with vLLM's own routes for adapters for the baseline."""
    flags = weight_flags(config, folder)
    if config.shares_weights:
        flags = (*flags, "--shared-weights", "--bridge-config-path", str(folder / FILE_NAME))
    spec = server_process(config, python=sys.executable, on_gpu=on_gpu, model=config.model_name, flags=flags)
    return replace(spec, env={**spec.env, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})


@contextlib.contextmanager
def _serving(config: TrainConfig, folder: Path, stop: StopSignal, *, on_gpu: bool) -> Iterator[None]:
    """Run a server within the block, and wait until it answers.

    If the server has ended, its last lines are the error instead of that of the missing answer.

    Args:
        stop: checks from then on whether the server has ended.

    Raises:
        ProcessFailedError: the server did not start, or has ended; the message has its last lines.
    """
    spec = server_spec(config, folder, on_gpu=on_gpu)
    with OwnedServer(lambda model, version: spec, config.log_dir / "server.log", folder / "served") as server:
        server.start(config.model_name, 0)
        server.wait_ready()
        stop.watch(server.check)
        try:
            yield
        except ServerError:
            server.check()
            raise


def used_mb(options: SyncOptions) -> float | None:
    """Return what all processes use on the GPUs of trainer and server, in units of 1e6 bytes; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name for part in (own, options.server_gpus) if part for name in part.split(",")]
    used = gpus_used_mb(",".join(dict.fromkeys(names)) if own else None)
    if used is None:  # then of the trainer's own GPU
        free, total = torch.cuda.mem_get_info()
        return round((total - free) / 1e6, 1)
    return used


def _since(before: float | None, options: SyncOptions) -> float | None:
    now = used_mb(options)
    return None if now is None or before is None else now - before


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
                early = _snapshot(publisher, number)
        late = _snapshot(publisher, options.repeat)
        quiet = publish_figures(publishes)
        log.info("publish: median %.1f ms, 95th percentile %.1f ms", quiet["publish_p50_ms"], quiet["publish_p95_ms"])
        facts = _bridge_facts(publisher, publishes)
        load = None if options.bridge == "none" or options.skip_load else load_figures(publisher)
        gpu_total, peak = _gb(used_mb(options)), _gb(torch.cuda.max_memory_allocated() / 1e6 if on_gpu else None)
        step = step_figures(publisher) if options.step_seqs else None
        baseline = vllm_baseline(publisher) if options.bridge == "lora_only" and options.baseline_repeat else {}
        return {
            **options.model_dump(include={"bridge", "shape", "share_base", "repeat"}),
            "lora_r": options.lora_r if options.bridge == "lora_only" else None,
            "dtype": info.dtype.removeprefix("torch."),
            "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
            "server_device": info.device,
            "server_workers": len(info.workers),
            "versions": {"vllm": info.vllm_version, "torch": torch.__version__, "python": platform.python_version()},
            "max_loras": info.max_loras,
            "keep_versions": info.keep_versions,
            "gpu_total_gb": gpu_total,
            "proof": proof,
            **publisher.loaded,
            **facts,
            **quiet,
            **{"baseline_ms": None, "baseline_save_ms": None, "baseline_repeat": 0, **baseline},
            "load": load,
            "memory": {
                "gpu_total_gb": gpu_total,
                "trainer_peak_gb": peak,
                # After the 10th and after the last publish without load, which shows leaks.
                **{f"flat_{name}": None if value is None else (value, late[name]) for name, value in early.items()},
            },
            "step": step,
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


def _bridge_facts(publisher: Publisher, publishes: Sequence[Publish]) -> dict[str, Any]:
    """Return the figures that only one bridge has."""
    facts: dict[str, Any] = {"transport": None, "adapter_mb": None}
    match publisher.options.bridge:
        case "lora_only":
            nbytes = sum(factor.numel() for factor in publisher.adapter.values()) * publisher.adapter_dtype.itemsize
            facts = {"transport": publisher.bridge.channel.name, "adapter_mb": round(nbytes / 1e6, 3)}
        case "shared_vllm":
            named = {"write_ms": "write_time", "pause_ms": "pause_time", "after_write_ms": "end_time"}
            facts |= {"write": "every weight times one, in place"}
            facts |= {ours: _ms(publishes, its) for ours, its in named.items()}
            facts["stall_beside_write_ms"] = quantile_ms([each["stall"] - each["pack"] for each in publishes])
        case "broadcast":
            channel, nbytes = publisher.bridge.channel, publisher.bridge.layout.nbytes
            seconds = statistics.median(each["total"] for each in publishes)
            facts |= {"transport": channel.name, "staged": channel.staging_bytes > 0}
            facts |= {"weights_gb": round(nbytes / 1e9, 4), "gb_per_s": round(nbytes / 1e9 / seconds, 2)}
    return facts


def _snapshot(publisher: Publisher, publishes: int) -> dict[str, float | None]:
    """Return what trainer and server hold now. Sizes in units of 1e6 bytes; the server's are of all its processes."""
    server = listener(publisher.config.server.port)
    assert server is not None
    rss = open_files = 0
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has ended since it was listed
            rss += process.memory_info().rss
            open_files += process.num_fds()
    bridge = publisher.config
    written = bridge.lora_root if bridge.weight_bridge_mode == "lora_only" else publisher.config.save_path
    return {
        "publishes": publishes,
        "server_rss_mb": round(rss / 1e6, 1),
        "server_open_files": open_files,
        "trainer_rss_mb": round(psutil.Process().memory_info().rss / 1e6, 1),
        "gpu_mb": used_mb(publisher.options),
        "adapters": len(publisher.client.lora_status().versions),
        "files": sum(1 for path in Path(written or "").rglob("*") if path.is_file()),
    }


def load_figures(publisher: Publisher) -> dict[str, float | int]:
    """Return tokens per second under load, without and with publishes, and the duration of publishes under load.

    Tokens are those that the server's own counter has at a window's ends; a window's first seconds are not counted.
    """
    options, url = publisher.options, publisher.config.server.url
    meter, sequences = Meter(url), options.in_flight
    base = {"policy_version": 0} if options.bridge == "lora_only" else {}
    publishes: list[Publish] = []
    tokens, seconds = [0.0] * 3, [0.0] * 3

    def until(end: float, *, publishing: bool) -> None:
        """Publish one version at a time, at a fixed rate, or as fast as possible if publishes take longer."""
        due = time.perf_counter()
        while publishing and due < end:
            time.sleep(max(0.0, due - time.perf_counter()))
            publishes.append(publisher.publish())
            due = max(due + options.publish_interval, time.perf_counter())
        time.sleep(max(0.0, end - time.perf_counter()))

    vocab, window = SHAPES[options.shape].vocab, options.load_seconds / ROUNDS
    for turn in [*range(3)] * ROUNDS:  # base model, adapter, adapter with publishes
        routing = base if turn == 0 else {}
        demand = Demand(url, sequences, options.prompt_len, options.completion_len, vocab, routing)
        with generating(demand, publisher.config.log_dir / "load.log", meter):
            start = time.perf_counter()
            until(start + min(SETTLE_SECONDS, SETTLE_SHARE * window), publishing=turn == 2)
            counted = meter.during(lambda start=start, turn=turn: until(start + window, publishing=turn == 2))
        publisher.check()
        tokens[turn] += counted[0]
        seconds[turn] += counted[1]
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
    * `weights_gb`: allocated by the trainer before the first step;
    * `peak_gb`: the most that the trainer had allocated at one time: weights, gradients, states, activations;
    * `server_gb`: taken by the server alone; `together_gb`: used on the GPU after the steps, by all processes;
    * `together_over_parts`: above 1 by what CUDA and torch keep for themselves.
    """
    import torch

    from grpo_trainer.trainer import Trainer

    options, on_gpu = publisher.options, torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() / 1e6 if on_gpu else None
    trainer = Trainer(publisher.policy.model, publisher.config)
    prompt, completion = options.step_prompt_len, options.step_completion_len
    work = StepOptions(shape=options.shape, seqs=options.step_seqs, prompt_len=prompt, completion_len=completion)
    seconds, row = 0.0, {}
    for number in range(TRAINED_STEPS):
        seconds, row = timed_step(trainer, synthetic_batch(work, number), number, publisher.bridge.updating)
        if options.bridge == "shared_vllm":
            publisher.version += 1
            publisher.bridge.publish(publisher.version)
    peak = torch.cuda.max_memory_allocated() / 1e6 if on_gpu else None
    server, together = publisher.server_mb, used_mb(options)
    parts = None if peak is None or server is None else server + peak
    return {
        "sequences": options.step_seqs,
        "optimizer": options.step_optimizer,
        "seconds": round(seconds, 3),
        "loss": row["train/loss"],
        "weights_gb": _gb(before),
        "peak_gb": _gb(peak),
        "server_gb": _gb(server),
        "together_gb": _gb(together),
        "together_over_parts": None if parts is None or together is None else round(together / parts, 4),
    }


def vllm_baseline(publisher: Publisher) -> dict[str, Any]:
    """Save by PEFT's `save_pretrained`, load by vLLM's own route, each time under a new name; medians.

    Call this last: vLLM's unload route forgets the name but leaves the adapter in its slot, and the server does not
    evict adapters to make room. So our versions are unloaded first, and there are at most as many loads as slots. The
    first load warms up. Saved in the server's dtype, the file is the smallest from which the server loses no precision.
    """
    bridge, model = publisher.config, publisher.policy.model
    assert bridge.weight_bridge_mode == "lora_only" and bridge.lora_root is not None
    for version in publisher.client.lora_status().versions:
        publisher.client.unload_adapter(version.name)
    repeat = min(publisher.options.baseline_repeat, publisher.info.max_loras - 1)
    saves, loads = [], []
    with httpx.Client(base_url=publisher.config.server.url, timeout=120.0, trust_env=False) as http:

        def post(route: str, body: dict[str, Any]) -> httpx.Response:
            if (answer := http.post(route, json=body)).status_code != 200:
                got = f"status {answer.status_code}"
                raise ServerError(answer.text[:500], field=f"baseline: POST {route}", got=got, wanted="200")
            return answer

        for name in (f"baseline-{number}" for number in range(repeat + 1)):
            folder, started = bridge.lora_root / name, time.perf_counter()
            state = {key: factor.detach().to(publisher.adapter_dtype) for key, factor in publisher.adapter.items()}
            model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
            saves.append(time.perf_counter() - started)
            started = time.perf_counter()
            post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            loads.append(time.perf_counter() - started)
            asked = {"model": name, "prompt": PROMPT, "max_tokens": 1, "ignore_eos": True}
            if (answered := post("/v1/completions", asked).json()["model"]) != name:
                raise BridgeError("another adapter answers", field="baseline", got=answered, wanted=name)
            post("/v1/unload_lora_adapter", {"lora_name": name})
    medians = {"baseline_ms": quantile_ms(loads[1:]), "baseline_save_ms": quantile_ms(saves[1:])}
    return {**medians, "baseline_repeat": repeat}


def _gb(megabytes: float | None) -> float | None:
    return None if megabytes is None else round(megabytes / 1e3, 3)
