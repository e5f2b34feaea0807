"""The page of all options, docs/options.md, from their one definition: `python scripts/options_table.py --write`."""

from __future__ import annotations

import sys
from pathlib import Path

from grpo_trainer.config.bridge import ADAPTER_MODES, ALL_WEIGHTS_MODES, BridgeConfig
from grpo_trainer.config.options import Option, Section, options_of, shown
from grpo_trainer.config.processes import BUILT_IN, PROMPTS, ApiProcess, RunOptions
from grpo_trainer.config.run import PASS_TOKENS, PROMPT_ROOM, build_run
from grpo_trainer.config.train import ADAPTER, ALL_WEIGHTS, SIZES, TrainConfig
from grpo_trainer.run_defaults import SMALLEST_PASS

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
BAR = "\\|"
"""What does not end a table's cell."""
START, END = "<!-- options: made by scripts/options_table.py -->\n", "<!-- end of options -->\n"


def tables() -> str:
    """Markdown: one table per group of options, the trainer's first, then what `grpo run` has besides."""
    parts = [defaults(), "\n## All options\n", *_tables(TrainConfig, ""), "\n`grpo run` has these besides:\n"]
    for section, prefix in ((RunOptions, ""), (ApiProcess, "api.")):
        parts += _tables(section, prefix)
    parts.append(
        "\n| option | default | |\n|---|---|---|\n"
        f"| `--env` | `arithmetic` | The environment: {', '.join(f'`{name}`' for name in BUILT_IN)}, "
        "or a module or file of yours. |\n"
        "| `--env.KEY`, `--openai.KEY` | | Options of the environment: `grpo env arithmetic serve --help`. |\n"
        "| `--dry-run`, `--json` | | Try the environment, and print the processes that the run would start, as a table "
        "or as JSON; start none. |\n"
        "| `--slurm FILE`, `--gpus-per-node` | `8` | Write a Slurm job script for this run to FILE, and start nothing; "
        "--gpus-per-node: GPUs of each machine (0: run on CPUs). |\n"
    )
    return "".join(parts)


def defaults() -> str:
    """Markdown: what `grpo run` chooses by bridge, model and machine."""
    config = build_run({}, {"model_name": "m"})
    trainer, adapter = config.trainer, BridgeConfig()
    small, medium = (f"{size // 10**6}M" for size in SIZES)
    sizes = (f"below {small} parameters", f"{small} to {medium}", f"{medium} and more, or unknown")
    others = ", ".join(f"`{mode}`" for mode in ALL_WEIGHTS_MODES)
    lines = [
        f"| | {', '.join(f'`{mode}`' for mode in ADAPTER_MODES)} | {others} |",
        "|---|---|---|",
        f"| trained | an adapter of rank {adapter.lora_r}, alpha {adapter.lora_alpha:g}, on all linear modules "
        "| all weights |",
        *(
            f"| `--lr`, model of {size} (usual range) "
            f"| {a.default:g} ({a.lowest:g} to {a.highest:g}) | {w.default:g} ({w.lowest:g} to {w.highest:g}) |"
            for size, a, w in zip(sizes, ADAPTER, ALL_WEIGHTS, strict=True)
        ),
    ]
    same = {
        "bridge": f"`{trainer.weight_bridge_mode}`",
        "prompts x answers a step": f"{PROMPTS} x {trainer.sequences_per_step // PROMPTS} (`--prompts-per-step`, "
        "`--env.group_size`)",
        "steps": f"{trainer.training_steps} (`--training-steps`)",
        "sequence length": f"{trainer.seq_len} tokens, or {PROMPT_ROOM} more than `--env.max_tokens` if that is "
        "longer; at most the model's limit (`--seq-len`)",
        "microbatch": f"{PASS_TOKENS} tokens, half as many, and so on down to {SMALLEST_PASS}, until the "
        f"memory plan fits; {SMALLEST_PASS} without a plan, as on a cluster (`--max-tokens-per-microbatch`)",
        "loss, KL": f"`{trainer.loss}`, {trainer.kl_beta:g} (`--loss`, `--kl-beta`)",
        "server's share of a GPU": f"{config.server.gpu_memory_utilization:g}, or less if the trainer needs the room",
    }
    lines += [f"| {name} | {value} | the same |" for name, value in same.items()]
    return "\n## Defaults of `grpo run`\n\n" + "\n".join(lines) + "\n"


def _tables(root: type[Section], prefix: str) -> list[str]:
    panels: dict[str, list[Option]] = {}
    for option in options_of(root):
        panels.setdefault(option.panel, []).append(option)
    return [
        f"\n| {panel} | default | |\n|---|---|---|\n" + "".join(_row(option, prefix) for option in options)
        for panel, options in panels.items()
    ]


def _row(option: Option, prefix: str) -> str:
    names = ", ".join(f"`--{prefix}{flag.removeprefix('--')}`" for flag in option.flags)
    default = f"`{shown(option.default)}`" if option.default not in (None, ()) else ""
    default = "required" if option.field.is_required() else default
    text = option.about
    if option.meanings:
        text += " " + "; ".join(f"`{value}`: {meaning}" for value, meaning in option.meanings.items()) + "."
    elif len(option.choices) > 1:
        text = " ".join(f"`{choice}`" for choice in option.choices) + ". " + text
    return f"| {names} | {default} | {text.replace('|', BAR)} |\n"


def insert(page: str) -> str:
    """The page with the tables of today between its markers."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return before + START + tables() + END + after


if __name__ == "__main__":
    page = insert(PAGE.read_text())
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page)
    else:
        print(tables())
