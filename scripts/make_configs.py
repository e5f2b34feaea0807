"""The example configurations of GSM8K, from their one definition: `python scripts/make_configs.py`.

Sizes of Qwen2.5-Instruct, each weight bridge, one, two and four GPUs, as far as that makes sense: one copy of the
weights is on one GPU; of two, one is the trainer's; of four, each has a trainer and a part of the server. Which of them
fit 80 GB is worked out by the memory plan of `grpo doctor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpo_trainer.config.run import RunConfig, build_run, read_toml
from grpo_trainer.doctor.memory import Devices, Setup
from grpo_trainer.doctor.model import ModelShape
from grpo_trainer.doctor.run_checks import server_spread

FOLDER = Path(__file__).parents[1] / "configs"
GPUS = (80, 141)
"""GB of an H100 and an H200."""


def _qwen(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, *, tied: bool = True) -> ModelShape:
    return ModelShape(
        hidden=hidden,
        intermediate=inner,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab=151_936 if tied else 152_064,
        tied=tied,
        biases=True,
        positions=32_768,
    )


SHAPES = {
    "0.5B": _qwen(896, 4864, 24, 14, 2),
    "1.5B": _qwen(1536, 8960, 28, 12, 2),
    "3B": _qwen(2048, 11_008, 36, 16, 2),
    "7B": _qwen(3584, 18_944, 28, 28, 4, tied=False),
}
"""Of Qwen2.5, from their configurations."""


@dataclass(frozen=True)
class Example:
    """One configuration.

    Attributes:
        kind: of the file's name: lora, shared, legacy, restart.
    """

    size: str
    kind: str
    gpus: int = 1

    @property
    def path(self) -> Path:
        gpus = "" if self.gpus == 1 else f"_{self.gpus}gpu"
        return FOLDER / f"gsm8k_{self.size.lower()}_{self.kind}{gpus}.toml"


MODES = {"lora": "lora_only", "shared": "shared_vllm", "legacy": "none", "restart": "lora_restart"}
WHAT = {
    "lora": "LoRA, swapped into the running server",
    "shared": "all weights, one copy for server and trainer",
    "legacy": "all weights, the server restarted on checkpoints",
    "restart": "LoRA, merged into a copy on which the server is restarted",
}
EXAMPLES = (
    *(Example(size, kind) for size in SHAPES for kind in MODES if (size, kind) != ("7B", "legacy")),
    *(Example(size, kind, 2) for size in SHAPES for kind in ("lora", "legacy")),
    *(Example(size, "lora", 4) for size in SHAPES),
)


def text(example: Example, fits: str) -> str:
    """The file; `fits` says on which GPUs."""
    whole = example.kind in ("shared", "legacy")
    trainer = {
        "model_name": f'"Qwen/Qwen2.5-{example.size}-Instruct"',
        "weight_bridge_mode": f'"{MODES[example.kind]}"',
        **({"device": '"cuda:1"'} if example.gpus == 2 else {}),
        "training_steps": "200",
        "batch_size": "8",
        "gradient_accumulation_steps": "32      # 256 sequences in a step: 32 questions, 8 answers each",
        "max_tokens_per_microbatch": "16384     # of a forward pass",
        "seq_len": "1024",
        "lr": "1e-6" if whole else "2e-5",
        "warmup_steps": "10",
        **({"optimizer": '"adamw_8bit"'} if whole and example.size in ("3B", "7B") else {}),
        **({"vllm_restart_interval": "5"} if example.kind in ("legacy", "restart") else {}),
        **({} if whole else {"lora_r": "16", "lora_alpha": "32"}),
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
            f"# GSM8K with Qwen2.5-{example.size}-Instruct: {WHAT[example.kind]}.",
            f"# For {where.get(example.gpus, four)}; {fits}.",
            "#",
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
            'name = "gsm8k"',
            "env = { group_size = 8, max_token_length = 1024 }",
            "",
        ]
    )


def _degree(example: Example) -> int:
    """GPUs of the server where there are four: as many as divide the attention heads."""
    return next(degree for degree in (4, 2) if SHAPES[example.size].heads % degree == 0)


def _share(example: Example) -> str:
    """Of a GPU's memory, for the server."""
    if example.gpus == 2:
        return "0.9"
    if example.kind == "legacy" and example.size == "3B":
        return "0.3"
    return "0.35" if example.kind == "shared" and example.size == "7B" else "0.45"


def fits(config: RunConfig, example: Example, gigabytes: int) -> bool:
    """Whether its plan leaves room on GPUs of so many GB."""
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
    """Write them all."""
    for example in EXAMPLES:
        example.path.write_text(text(example, ""))
        example.path.write_text(text(example, said(example)))


if __name__ == "__main__":
    main()
