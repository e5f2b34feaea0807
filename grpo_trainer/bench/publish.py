"""`grpo bench sync`: a weight bridge, opened as the trainer opens it, with a server and a trainer that only publishes.

The figures of a publish are the bridge's own metrics, which a run writes at each step.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from grpo_common.ports import listener
from grpo_trainer.bench.load import Demand, generated, generating, quantile_ms
from grpo_trainer.bench.models import CACHE_BYTES_TINY, SHAPES, ModelOptions, ensure_model
from grpo_trainer.bench.step import StepOptions, synthetic_batch, timed_step
from grpo_trainer.config.bridge import ALL_LINEAR
from grpo_trainer.config.options import build, option
from grpo_trainer.config.rules import checked
from grpo_trainer.config.server import Quantization
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import BridgeError, ServerError
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

PROMPT = [2, 3, 5, 7]
TOTAL, STALL = "train/sync_time", "publish/stall_time"
"""Metrics of a publish: all of it, and the engine's pause."""
LONGEST = 2048
"""Tokens of the longest sequence that is served."""
LORA_R = 16
"""Rank of the adapter, on all linear modules."""
SMALL_B = 1e-3
ROUNDS = 2
"""Base model, newest adapter, and that with publishes take turns this many times, so that drift cancels."""
SETTLE_SECONDS, SETTLE_SHARE = 4.0, 0.3


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
    proof: bool = option(True, help="Prove the server's weights before the measurement.")
    gpu_memory_utilization: float = option(0.5, help="Share of the GPU's memory for vLLM.", gt=0, le=1)
    kv_cache_gb: float | None = option(
        None, help="GB of the server's KV cache (default: what that share leaves, as vLLM measures it).", gt=0
    )
    tensor_parallel_size: int = option(1, help="Tensor parallel size of the server.", ge=1)
    server_gpus: str | None = option(None, help="CUDA_VISIBLE_DEVICES of the server (default: as the trainer's).")
    quantization: Quantization = option("none", help="Quantisation of the server's weights; needs a GPU.")
    skip_load: bool = option(False, help="Do not measure under load.")
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


@dataclass
class Publisher:
    """A connected bridge, and a trainer that does nothing but publish."""

    options: SyncOptions
    config: TrainConfig
    policy: Policy
    bridge: Any
    client: ServerClient
    info: BridgeInfo
    version: int
    """The version that was published last."""
    server_gb: float | None
    """GPU memory of the server after its start, in units of 1e9 bytes; None: there is no GPU."""

    def __post_init__(self) -> None:
        named = dict(self.policy.model.named_parameters())
        self.factors = [parameter.detach() for name, parameter in named.items() if "lora_B" in name]
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

    def write(self, change: Callable[[], object]) -> dict[str, float]:
        """Change the weights and publish them as the next version; return the metrics of the publish."""
        import torch

        from grpo_trainer.metrics.types import reduce

        self.version += 1
        with torch.no_grad(), self.bridge.updating():
            change()
        return reduce(self.bridge.publish(self.version).metrics)

    def publish(self) -> dict[str, float]:
        """Change the weights, publish them, and raise a `BridgeError` if another version answers a request."""
        written = self.write(self.change)
        answer = self.client.generate(PROMPT, max_tokens=1, temperature=1.0, ignore_eos=True)
        if answer.policy_version != self.version:
            got, wanted = f"{answer.model}, version {answer.policy_version}", f"version {self.version}"
            raise BridgeError("another version answers than was published", got=got, wanted=wanted)
        return written

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


def trainer_config(options: SyncOptions, folder: Path, model: Path, *, on_gpu: bool) -> TrainConfig:
    """Return the options of the trainer that publishes, and of its server, both of which write into `folder`."""
    of_bridge: dict[str, dict[str, Any]] = {
        "lora_only": {
            **{"lora_transport": options.transport, "lora_root": folder / "adapters"},
            **{"lora_r": LORA_R, "lora_alpha": 2.0 * LORA_R},
        },
        "broadcast": {"broadcast_transport": options.transport, "broadcast_staging": options.staging},
    }
    alike = {"proof", "gpu_memory_utilization", "tensor_parallel_size", "quantization"}
    values = {
        **options.model_dump(include=alike),
        **of_bridge.get(options.bridge, {}),
        "model": str(model),
        "dtype": "bfloat16" if on_gpu else "float32",
        "compile": "off",
        "seq_len": LONGEST,
        "max_model_len": LONGEST,
        "training_steps": 1_000_000_000,  # it does not end before the measurement
        "batch_size": 8,
        "gradient_accumulation_steps": max(1, options.step_seqs // 8),
        "max_tokens_per_microbatch": 4608,
        "optimizer": options.step_optimizer,
        "gradient_checkpointing": True,
        "drift_limit": 0,
        "save_path": folder / "written",
        "log_dir": options.log_dir or folder,
        "weight_bridge_mode": options.bridge,
        "share_base": options.share_base or None,
        "vllm_port": claim_ports({"server": 0})["server"],
        "vllm_gpus": options.server_gpus,
    }
    config = checked(build(TrainConfig, {name: value for name, value in values.items() if value is not None}))
    cache = CACHE_BYTES_TINY if options.shape == "tiny" and not on_gpu else None
    if options.kv_cache_gb is not None:
        cache = int(options.kv_cache_gb * 1e9)
    flags = () if cache is None else (CACHE_FLAG, str(cache))
    return config.model_copy(update={"server": config.server.model_copy(update={"extra_args": flags})})


@contextlib.contextmanager
def opened(options: SyncOptions) -> Iterator[Publisher]:
    """Write the model, start its server, and connect a bridge within the block.

    The model is loaded before the server starts: vLLM must not see memory come and go while it measures what is free. A
    model in the server's memory takes none, and is attached afterwards.

    Raises:
        ProcessFailedError: the server did not start, or has ended; the message has its last lines.
    """
    import torch

    from grpo_trainer.optim.adamw import AdamW
    from grpo_trainer.policy import build_policy
    from grpo_trainer.saving.checkpoint import Checkpoints, Progress
    from grpo_trainer.weights.build import build_bridge

    on_gpu, stop = torch.cuda.is_available(), StopSignal()
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="grpo-bench-")))
        model = (options.model_dir or folder / "model").absolute()
        ensure_model(SHAPES[options.shape], model, torch.bfloat16 if on_gpu else torch.float32)
        config = trainer_config(options, folder, model, on_gpu=on_gpu)
        early = None if config.shares_weights else build_policy(config)
        if on_gpu:
            torch.cuda.empty_cache()  # what loading has left is none of the server's
        before = used_gb()
        flags = weight_flags(config, folder)
        if config.shares_weights:
            flags = (*flags, "--shared-weights", "--bridge-config-path", str(folder / FILE_NAME))
        spec = server_process(config, python=sys.executable, on_gpu=on_gpu, model=config.model_name, flags=flags)
        server = OwnedServer(lambda *_: spec, config.log_dir / "server.log", folder / "served")
        held.enter_context(server)
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
            yield Publisher(options, config, policy, bridge, client, info, version, server_gb)
        except ServerError:
            server.check()  # of a server that has ended, the last lines are the error
            raise


def used_gb() -> float | None:
    """Return what all processes use on the trainer's GPU, in units of 1e9 bytes; None: there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 1e9, 4)


def measure(options: SyncOptions) -> dict[str, Any]:
    """Start a server, publish to it, load it, and end it; return the figures, or raise a `GrpoError`."""
    import torch

    with opened(options) as publisher:
        on_gpu, info = torch.cuda.is_available(), publisher.info
        for factor in publisher.factors:
            factor.normal_(std=SMALL_B)  # a fresh adapter's B is 0: it would have no effect
        noise = publisher.bridge.prove()
        proved = None if noise is None else asdict(publisher.bridge.proved)
        publisher.warm_up()
        first = min(10, options.repeat)
        publishes = [publisher.publish() for _ in range(first)]
        early = _snapshot(publisher)
        publishes += [publisher.publish() for _ in range(options.repeat - first)]
        late = _snapshot(publisher)
        adapter = SHAPES[options.shape].adapter_parameters(LORA_R, ALL_LINEAR)
        itemsize = getattr(torch, (info.lora_dtype or info.dtype).removeprefix("torch.")).itemsize
        return {
            **options.model_dump(include={"bridge", "shape", "share_base", "repeat"}),
            "lora_r": LORA_R if options.bridge == "lora_only" else None,
            "dtype": info.dtype.removeprefix("torch."),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "versions": {"vllm": info.vllm_version, "torch": torch.__version__, "python": platform.python_version()},
            # In nats a token.
            "proof": proved and {name: float(f"{value:.3g}") for name, value in proved.items()},
            "transport": getattr(getattr(publisher.bridge, "channel", None), "name", None),
            "adapter_mb": round(adapter * itemsize / 1e6, 3) if options.bridge == "lora_only" else None,
            **publish_figures(publishes),
            "load": None if options.skip_load else load_figures(publisher),
            "memory": {
                "gpu_total_gb": used_gb(),
                "trainer_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if on_gpu else None,
                # After the 10th and after the last publish without load, which shows leaks.
                **{f"flat_{name}": None if value is None else (value, late[name]) for name, value in early.items()},
            },
            "step": step_figures(publisher) if options.step_seqs else None,
        }


def publish_figures(publishes: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return medians and 95th percentiles of publishes on an idle server, and the medians of what the bridge timed.

    `stall_ms`: the engine's pause. `lora_only` has `save_ms` (packing) and `load_ms` (the server's part), `shared_vllm`
    `write_ms`, `pause_ms` (of the engine's calls) and `end_ms`, `broadcast` `send_ms` and `write_ms`.
    """
    timed = {key.partition("/")[2] for key in publishes[0] if key.startswith("publish/") and key.endswith("_time")}
    return {
        "publish_p50_ms": _ms(publishes, TOTAL),
        "publish_p95_ms": _ms(publishes, TOTAL, 0.95),
        **{f"{name.removesuffix('_time')}_ms": _ms(publishes, f"publish/{name}") for name in sorted(timed)},
        "stall_p95_ms": _ms(publishes, STALL, 0.95),
    }


def _ms(publishes: Sequence[Mapping[str, float]], name: str, share: float = 0.5) -> float:
    return quantile_ms([publish[name] for publish in publishes], share)


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
    sequences = 256 if on_gpu else 16
    base = {"policy_version": 0} if options.bridge == "lora_only" else {}
    publishes: list[dict[str, float]] = []
    tokens, seconds = [0.0] * 3, [0.0] * 3

    def until(end: float, *, publishing: bool) -> None:
        """Publish one version a second, or as fast as possible if publishes take longer."""
        due = time.perf_counter()
        while publishing and due < end:
            time.sleep(max(0.0, due - time.perf_counter()))
            publishes.append(publisher.publish())
            due = max(due + 1.0, time.perf_counter())
        time.sleep(max(0.0, end - time.perf_counter()))

    vocab, window = SHAPES[options.shape].vocab, options.load_seconds / ROUNDS
    for turn in [*range(3)] * ROUNDS:  # base model, adapter, adapter with publishes
        demand = Demand(url, sequences, 64, 256, vocab, base if turn == 0 else {})
        with generating(demand):
            start = time.perf_counter()
            until(start + min(SETTLE_SECONDS, SETTLE_SHARE * window), publishing=turn == 2)
            before, began = generated(url)
            until(start + window, publishing=turn == 2)
            after, ended = generated(url)
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
        "publish_under_load_p50_ms": _ms(publishes, TOTAL),
        "publish_under_load_p95_ms": _ms(publishes, TOTAL, 0.95),
        "stall_under_load_p50_ms": _ms(publishes, STALL),
        "stall_under_load_p95_ms": _ms(publishes, STALL, 0.95),
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
    work = StepOptions(shape=options.shape, seqs=options.step_seqs, prompt_len=512, completion_len=1024)
    seconds, row = 0.0, {}
    for number in range(2):  # the first one creates the optimizer's states
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
