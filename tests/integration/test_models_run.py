"""Whole runs of models that need a copy of the weights on each side, and of the released one: proved, and trained.

The conditional models need torchvision beside vLLM's CPU build, which the locks leave out.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from environments.demo_model.folder import DemoModelError
from environments.demo_model.model import build_tokenizer, write_released
from environments.peers.inference import Completion
from environments.tokenizers import load_tokenizer, prompt_ids
from environments.word_problems import WordProblem, WordProblemsEnv, held_out_problems
from tests.golden.models import CONDITIONAL, IN_16_BITS, adapted_modules, save_model
from tests.integration.serving import serve
from tests.processes import ROOT
from tests.quantised_models import METHODS
from tests.runs import of_mode, rows, trained

pytestmark = pytest.mark.timeout(900)

WITHOUT_TORCHVISION = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="vLLM serves conditional models with torchvision only"
)
RUNS = [
    ("deepseek_v2", "broadcast"),  # vLLM's CPU build does not serve LoRA for mixtures of experts
    *(
        pytest.param(architecture, mode, marks=WITHOUT_TORCHVISION)
        for architecture in CONDITIONAL
        for mode in ("lora_only", "broadcast")
    ),
]


@pytest.mark.parametrize(("architecture", "mode"), RUNS)
def test_a_run_passes_its_proof_and_trains(tmp_path: Path, architecture: str, mode: str) -> None:
    tokenizer = build_tokenizer()
    folder = tmp_path / "model"
    save_model(architecture, folder, vocabulary=len(tokenizer))
    tokenizer.save_pretrained(folder)
    # Random models get no rewards: the entropy bonus trains them.
    options = of_mode(mode, env="arithmetic", training_steps=2, entropy_coef=0.01)
    if mode == "lora_only":
        options["lora-target-modules"] = ",".join(adapted_modules(architecture))
    if architecture in IN_16_BITS:
        options["dtype"] = "bfloat16"
    if architecture == "deepseek_v2":  # on CPUs with AMX vLLM prefers a backend that has 16 bits only
        options["server.extra-args"] += ",--attention-backend,CPU_MLA"
    done = trained(folder, tmp_path / "run", **options)
    assert [row["step"] for row in done] == [1, 2]
    limit = 0.1 if architecture in IN_16_BITS else 1e-3
    assert done[0]["train/logprob_gap"] < limit  # samples of later steps may be of the version before


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_base_is_served_as_it_is_and_trained(tmp_path: Path, method: str) -> None:
    options = of_mode("lora_only", env="arithmetic", training_steps=2, entropy_coef=0.01, dtype="bfloat16")
    done = trained(ROOT / "tests/data/quantised" / method, tmp_path / "run", **options)
    assert [row["step"] for row in done] == [1, 2]
    assert done[0]["train/logprob_gap"] < 0.05  # both sides compute the same function, in bfloat16
    served = (tmp_path / "run/logs/server.log").read_text()
    assert re.search(rf"\bquantization=(auto_)?{method}\b", served)


# the released model ------------------------------------------------------------------------------------------


class NumbersEnv(WordProblemsEnv):
    """Word problems whose reward is 1 for any answer that has a digit.

    Few answers of the untrained model are right, so a small batch of them would often teach nothing.
    """

    name = "numbers"

    async def score_group(self, item: WordProblem, completions: Sequence[Completion]) -> list[float]:
        return [float(any(map(str.isdigit, self.decode(completion)))) for completion in completions]


LENGTH = 192
"""Tokens of a word problem with its answer."""


@pytest.fixture(scope="module")
def released_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released") / "smollm2"
    try:
        write_released(folder)
    except DemoModelError as error:
        pytest.skip(f"needs the released model: {error}")
    return folder


def test_its_answers_end_where_its_chats_do(released_model: Path) -> None:
    tokenizer = load_tokenizer(str(released_model))
    chat = tokenizer.apply_chat_template([{"role": "assistant", "content": "7"}], tokenize=False)
    assert str(chat).rstrip().endswith(f"7{tokenizer.eos_token}")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((released_model / name).read_text())["eos_token_id"] == tokenizer.eos_token_id


@pytest.fixture(scope="module")
def run_dir(released_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, each on samples of the newest policy.

    Few layers have an adapter: the proof looks for each module of it.
    """
    folder = tmp_path_factory.mktemp("run")
    options = {"env": "tests.integration.test_models_run", "env__group_size": 8, "env__max_tokens": 12}
    options |= {"batch_size": 8, "seq_len": LENGTH, "lora_r": 16, "max_staleness": 0, "checkpoint_interval": 0}
    options |= {"lora_layer_indices": "28-29", "lr": 1e-2}  # after a step or two its answers are others
    trained(released_model, folder / "run", seconds=900, **options)
    return folder / "run"


def test_three_steps_are_proved_and_server_and_trainer_agree(run_dir: Path) -> None:
    done = rows(run_dir)
    assert [row["step"] for row in done] == [1, 2, 3]
    assert all(row["rollout/staleness_max"] == 0 for row in done)
    learnt = [row for row in done if not row["train/skipped"]]  # others: no group had both rewards
    assert learnt and all(row["alignment/logprob_diff_max"] <= 1e-4 for row in learnt)  # nats, float32
    assert all(row["train/changed_fraction"] > 0 for row in learnt)
    assert "bridge proved" in (run_dir / "logs" / "trainer.log").read_text()


def test_served_checkpoint_and_its_export_answer_alike(released_model: Path, run_dir: Path, tmp_path: Path) -> None:
    export, checkpoint = tmp_path / "export", run_dir / "checkpoints" / "adapter_final"
    merge = [sys.executable, "-m", "grpo_trainer", "export", str(checkpoint), str(export), "--merge"]
    subprocess.run(merge, cwd=ROOT, check=True, timeout=300)
    tokenizer = load_tokenizer(str(released_model))
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": each.text}]) for each in held_out_problems([1, 2], 4)]
    flags = ["--max-model-len", str(LENGTH), "--max-lora-rank", "16", "--lora-root", str(run_dir)]
    with serve(released_model, tmp_path, *flags) as server:
        loaded = server.post("/lora/load", {"adapter_path": str(checkpoint)})
        assert loaded.status_code == 200, loaded.text
        found = [server.generate(prompt, temperature=0.0, max_tokens=24).token_ids[0] for prompt in prompts]
    assert plain_answers(export, prompts) == found
    assert plain_answers(checkpoint, prompts[:2]) == found[:2]
    assert plain_answers(released_model, prompts) != found


def plain_answers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers of transformers, in float32 as the server's."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    end = model.generation_config.eos_token_id
    rows = [
        model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=end)[0, len(prompt) :]
        for prompt in prompts
    ]
    return [row.tolist() for row in rows]


if __name__ == "__main__":
    NumbersEnv.cli()
