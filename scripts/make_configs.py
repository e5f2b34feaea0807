"""The example configurations, from their one definition: `python scripts/make_configs.py`.

GSM8K with sizes of Qwen2.5-Instruct, each weight bridge, one, two and four GPUs, as far as that makes sense: one copy
of the weights is on one GPU; of two, one is the trainer's; of four, each has a trainer and a part of the server. Word
problems and GSM8K with SmolLM2-135M-Instruct, on one GPU. Which of them fit 80 GB is worked out by the memory plan of
`grpo doctor`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from grpo_trainer.bench import shapes
from grpo_trainer.config.run import RunConfig, build_run, read_toml
from grpo_trainer.doctor.memory import Devices, Setup
from grpo_trainer.doctor.model import ModelShape
from grpo_trainer.doctor.run_checks import server_spread

FOLDER = Path(__file__).parents[1] / "configs"
GPUS = (80, 141)
"""GB of an H100 and an H200."""

SHAPES = {
    **{size: shapes.SHAPES[size.lower()] for size in ("0.5B", "1.5B", "7B")},
    "3B": shapes.qwen2(2048, 11_008, 36, 16, 2, 151_936, tied=True),
    "135M": ModelShape(576, 1536, layers=30, heads=9, kv_heads=3, head_dim=64, vocab=49_152, tied=True, positions=8192),
}
"""Of Qwen2.5, and of SmolLM2 (135M), from their configurations."""


@dataclass(frozen=True)
class Task:
    """What is learnt by which model.

    Attributes:
        model: name of the model, {} for its size; `folder`: where it is, if it is not on the hub.
        made: command that makes that folder.
        microbatches: of 8 sequences, in a step.
        rates: learning rate of an adapter, and of all weights.
        schedule: of the learning rate; empty: the default.
        restart_interval: steps between restarts of the server, where there are restarts.
        eval_every: steps between evaluations; 0: none.
        env: the environment's settings, besides `group_size` and `max_token_length`.
    """

    title: str
    environment: str
    model: str = "Qwen/Qwen2.5-{}-Instruct"
    folder: str = ""
    made: str = ""
    steps: int = 200
    warmup: int = 10
    group: int = 8
    microbatches: int = 32
    seq_len: int = 1024
    rates: tuple[str, str] = ("2e-5", "1e-6")
    schedule: str = ""
    restart_interval: int = 5
    eval_every: int = 0
    env: str = ""


QWEN = Task("GSM8K", "gsm8k")
SMOLLM2 = {
    "model": "SmolLM2-{}-Instruct",
    "folder": "runs/smollm2",
    "made": "grpo demo-model runs/smollm2 --released",
    "rates": ("3e-4", "3e-5"),
    "schedule": "linear",
    "restart_interval": 10,
}
WORDS = Task(
    "Word problems",
    "word_problems",
    steps=200,
    warmup=5,
    group=16,  # before training about 3 % of the answers are right
    microbatches=64,
    seq_len=256,
    eval_every=10,
    env='level = "1-2", ',
    **SMOLLM2,
)
LENIENT = Task(  # the model never writes the form that the strict reward asks for
    "GSM8K",
    "gsm8k",
    group=16,
    microbatches=64,
    seq_len=640,
    eval_every=25,
    env='reward = "lenient", eval_questions = 200, ',
    **SMOLLM2,
)


@dataclass(frozen=True)
class Example:
    """One configuration.

    Attributes:
        kind: of the file's name: lora, shared, legacy, restart, broadcast.
        name: of the file; empty: made of size, kind and GPUs.
    """

    size: str
    kind: str
    gpus: int = 1
    task: Task = QWEN
    name: str = ""

    @property
    def path(self) -> Path:
        gpus = "" if self.gpus == 1 else f"_{self.gpus}gpu"
        return FOLDER / f"{self.name or f'gsm8k_{self.size.lower()}_{self.kind}{gpus}'}.toml"


SIZES = ("0.5B", "1.5B", "3B", "7B")
MODES = {
    "lora": "lora_only",
    "shared": "shared_vllm",
    "legacy": "none",
    "restart": "lora_restart",
    "broadcast": "broadcast",
}
WHAT = {
    "lora": "LoRA, swapped into the running server",
    "shared": "all weights, one copy for server and trainer",
    "legacy": "all weights, the server restarted on checkpoints",
    "restart": "LoRA, merged into a copy on which the server is restarted",
    "broadcast": "all weights, sent to the running server",
}
ONE_GPU = ("lora", "shared", "legacy", "restart")
EXAMPLES = (
    *(Example(size, kind) for size in SIZES for kind in ONE_GPU if (size, kind) != ("7B", "legacy")),
    *(Example(size, kind, 2) for size in SIZES for kind in ("lora", "legacy", "broadcast")),
    *(Example(size, kind, 4) for size in SIZES for kind in ("lora", "broadcast")),
    Example("135M", "lora", task=WORDS, name="smollm2_lora"),
    Example("135M", "shared", task=WORDS, name="smollm2_shared"),
    Example("135M", "legacy", task=replace(WORDS, steps=150), name="smollm2_none"),
    Example("135M", "lora", task=LENIENT, name="smollm2_gsm8k"),
)


def text(example: Example, fits: str) -> str:
    """The file; `fits` says on which GPUs."""
    task, whole = example.task, example.kind in ("shared", "legacy", "broadcast")
    model, sequences = task.model.format(example.size), 8 * task.microbatches
    a_step = f"{sequences} sequences in a step: {sequences // task.group} questions, {task.group} answers each"
    trainer = {
        "model_name": f'"{task.folder or model}"',
        "weight_bridge_mode": f'"{MODES[example.kind]}"',
        **({"device": '"cuda:1"'} if example.gpus == 2 else {}),
        "training_steps": str(task.steps),
        "batch_size": "8",
        "gradient_accumulation_steps": f"{task.microbatches}      # {a_step}",
        "max_tokens_per_microbatch": "16384     # of a forward pass",
        "seq_len": str(task.seq_len),
        "lr": task.rates[whole],
        **({"lr_schedule": f'"{task.schedule}"'} if task.schedule else {}),
        "warmup_steps": str(task.warmup),
        **({"optimizer": '"adamw_8bit"'} if whole and example.size in ("3B", "7B") else {}),
        **({"vllm_restart_interval": str(task.restart_interval)} if example.kind in ("legacy", "restart") else {}),
        **({} if whole else {"lora_r": "16", "lora_alpha": "32"}),
        **({"eval_every": str(task.eval_every)} if task.eval_every else {}),
        "keep_checkpoints": "2",
        "log_samples": "4                          # for `grpo report`",
    }
    server = {"gpu_memory_utilization": _share(example)}
    if example.gpus == 4:
        server["tensor_parallel_size"] = str(_degree(example))
    where = {1: "one GPU", 2: "two GPUs: the server on the first, the trainer on the second"}
    served = "server and trainers on all of them" if _degree(example) == 4 else "trainers on all, the server on two"
    four = f"four GPUs: {served}"
    return "\n".join(
        [
            f"# {task.title} with {model.rpartition('/')[2]}: {WHAT[example.kind]}.",
            f"# For {where.get(example.gpus, four)}; {fits}.",
            "#",
            *([f"#   {task.made}"] if task.made else []),
            f"#   grpo doctor --config configs/{example.path.name}",
            f"#   grpo run --config configs/{example.path.name} --run-dir runs/{example.path.stem}",
            "",
            *(["trainer_gpus = 4", ""] if example.gpus == 4 else []),
            "[trainer]",
            *(f"{key} = {value}" for key, value in trainer.items()),
            "",
            "[server]",
            *(f"{key} = {value}" for key, value in server.items()),
            "",
            "[[environments]]",
            f'name = "{task.environment}"',
            f"env = {{ {task.env}group_size = {task.group}, max_token_length = {task.seq_len} }}",
            "",
        ]
    )


def _degree(example: Example) -> int:
    """GPUs of the server where there are four: as many as divide the attention heads."""
    return next(degree for degree in (4, 2, 1) if SHAPES[example.size].heads % degree == 0)


def _share(example: Example) -> str:
    """Of a GPU's memory, for the server."""
    if example.gpus == 2:  # a version is staged next to the served weights
        return "0.7" if example.kind == "broadcast" else "0.9"
    if example.kind == "legacy" and example.size == "3B":
        return "0.3"
    return "0.35" if example.kind == "shared" and example.size == "7B" else "0.45"


def fits(config: RunConfig, example: Example, gigabytes: int) -> bool:
    """Return whether its plan leaves room on GPUs of this many GB."""
    devices = Devices("cuda", gigabytes * 10**9, example.gpus)
    spread, trainers = server_spread(config), config.options.trainer_gpus
    plan = Setup(config.trainer, SHAPES[example.size], spread, devices, trainers).plan()
    return not plan.problems and not plan.is_tight


def said(example: Example) -> str:
    """On which GPUs it fits, as its file says."""
    config = build_run(read_toml(example.path), {})
    least = next((size for size in GPUS if fits(config, example, size)), None)
    return f"fits {least} GB" if example.gpus == 1 else f"fits {least} GB each"


def main() -> None:
    for example in EXAMPLES:
        example.path.write_text(text(example, ""))
        example.path.write_text(text(example, said(example)))


if __name__ == "__main__":
    main()
