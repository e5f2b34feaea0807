"""docs/migration.md names every flag of the original, and what it says is here is here; so do its rows on TRL."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from environments.config import ServerConfig
from environments.gsm8k import Gsm8kConfig
from grpo_trainer.cli import app
from grpo_trainer.config.options import options_of
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.train import TrainConfig

GUIDE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()

TRAINER = (
    "--model --model-name --lr --training-steps --batch-size --seq-len --gradient-accumulation-steps --device "
    "--save-path --checkpoint-interval --kl-coef --clip-eps --no-reference-logprobs --vllm-port "
    "--gpu-memory-utilization --vllm-gpu-memory-utilization --max-model-len --dtype --vllm-restart-interval "
    "--atropos-url --use-wandb "
    "--wandb-project --wandb-group --weight-bridge-mode --vllm-config-path --lora-r --lora-alpha --lora-dropout "
    "--lora-target-modules --trainer-rank --world-size --init-method --num-inference-nodes --debug-loading --benchmark "
    "--log-dir --warmup-steps --train-layer-indices --lora-layer-indices --vllm-gpu --adafactor-scale-parameter "
    "--adafactor-relative-step"
)


def row(flag: str, table: str) -> list[str]:
    """The cells of the flag's row in the table whose head has that text."""
    _, _, after = GUIDE.partition(table)
    lines = [line for line in after.partition("\n\n")[0].splitlines() if f"`{flag}`" in line.split("|")[1]]
    assert len(lines) == 1, (flag, lines)
    return [cell.strip() for cell in lines[0].split("|")[1:-1]]


@pytest.mark.parametrize("flag", TRAINER.split())
def test_every_flag_of_the_trainer_has_a_row_that_is_true(flag: str) -> None:
    ours = {name for leaf in options_of(TrainConfig) for name in (*leaf.flags, *leaf.former)}
    here = row(flag, "| there | default there | here | |\n")[2]
    if "the same" in here:
        assert flag in ours
    elif here.startswith("`"):
        assert re.findall(r"`(--[a-z.-]+)", here)[0] in ours
    else:
        assert here == "none" and flag not in ours


@pytest.mark.parametrize(("kind", "config"), [("env", Gsm8kConfig), ("openai", ServerConfig)])
def test_every_flag_of_the_environment_has_a_row_that_is_true(kind: str, config: type[BaseModel]) -> None:
    library = pytest.importorskip("atroposlib.envs.base", reason="the original's: pip install atroposlib==0.4.0")
    original = library.BaseEnvConfig if kind == "env" else library.APIServerConfig
    for name in original.model_fields:
        here = row(name, f"| `--{kind}.…` there")[-1]
        known = name in config.model_fields or name == "max_num_workers"  # an alias
        assert known == (not here.startswith("none") and not here.startswith("`--openai.timeout")), (name, here)


def rows_from_trl() -> list[list[str]]:
    _, _, after = GUIDE.partition("| `GRPOTrainer`, `GRPOConfig` | `grpo run` | |\n")
    return [line.split("|")[1:-1] for line in after.partition("\n\n")[0].splitlines()[1:]]


def from_trl(words: str, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    found: list[RunConfig] = []
    monkeypatch.setattr("grpo_trainer.run.run", lambda config, console: found.append(config))
    needed = {"--model": "m", "--reward": "exact_match"} if "--data" in words else {"--model": "m"}
    needed |= {"--data": "rows.jsonl"} if "--reward" in words else {}
    more = [word for flag, value in needed.items() if flag not in words for word in (flag, value)]
    CliRunner().invoke(app, ["run", *shlex.split(words), *more], catch_exceptions=False)
    return found[0]


@pytest.mark.parametrize("cells", rows_from_trl(), ids=lambda cells: cells[0].strip())
def test_every_row_from_trl_is_accepted_in_both_spellings(cells: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, here, other = (cell.strip() for cell in cells)
    if here == "none":
        return
    config = from_trl(here.strip("`"), monkeypatch)
    if re.fullmatch(r"`--[a-z-]+ [^`]+`", other):
        flag, value = other.strip("`").split(" ", 1)
        for spelled in (flag, flag.replace("-", "_").replace("__", "--", 1)):
            assert from_trl(f"{spelled} {value}", monkeypatch) == config
