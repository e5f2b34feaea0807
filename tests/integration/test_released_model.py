"""The released model on a CPU: three steps of a real run, and the answers of a server and of plain transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from environments.demo_model.released import DemoModelError, write_released
from environments.tokenizers import load_tokenizer, prompt_ids
from environments.word_problems import held_out_problems
from tests.processes import ROOT, answers, free_port, running, tail, wait_for
from tests.runs import finished, rows, started
from vllm_server.protocol import GenerateRequest, TokenPrompt

pytestmark = pytest.mark.timeout(1200)

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
    log = folder / "log"
    options = {"env": "tests.integration.numbers_environment", "env__group_size": 8, "env__max_tokens": 12}
    options |= {"batch_size": 8, "seq_len": LENGTH, "lora_r": 16, "max_staleness": 0, "checkpoint_interval": 0}
    options |= {"lora_layer_indices": "28-29", "lr": 1e-2}  # after a step or two its answers are others
    with started(released_model, folder / "run", log, **options) as process:
        assert finished(process, log, 900) == 0, tail(log)
    return folder / "run"


def test_three_steps_are_proved_and_server_and_trainer_agree(run_dir: Path) -> None:
    done = rows(run_dir)
    assert [row["step"] for row in done] == [1, 2, 3]
    assert all(row["rollout/staleness_max"] == 0 for row in done)
    trained = [row for row in done if not row["train/skipped"]]  # others: no group had both rewards
    assert trained and all(row["alignment/logprob_diff_max"] <= 1e-4 for row in trained)  # nats, float32
    assert all(row["train/changed_fraction"] > 0 for row in trained)
    assert "bridge proved" in (run_dir / "logs" / "trainer.log").read_text()


def test_a_served_checkpoint_and_its_export_in_plain_transformers_answer_alike(
    released_model: Path, run_dir: Path, tmp_path: Path
) -> None:
    export, log, port = tmp_path / "export", tmp_path / "log", free_port()
    checkpoint = run_dir / "checkpoints" / "adapter_final"
    merge = [sys.executable, "-m", "grpo_trainer", "export", str(checkpoint), str(export), "--merge"]
    subprocess.run(merge, cwd=ROOT, check=True, timeout=300)
    tokenizer = load_tokenizer(str(released_model))
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": each.text}]) for each in held_out_problems([1, 2], 4)]
    url = f"http://127.0.0.1:{port}"
    serve = ["--model", str(released_model), "--port", str(port), "--max-model-len", str(LENGTH)]
    serve += ["--max-lora-rank", "16", "--lora-root", str(run_dir)]
    greedy = {"temperature": 0.0, "max_tokens": 24}
    with running("-m", "vllm_server", *serve, log=log) as process, httpx.Client(trust_env=False, timeout=120) as client:
        wait_for("a healthy server", lambda: process.poll() is not None or answers(f"{url}/health"), log, 240)
        loaded = client.post(f"{url}/lora/load", json={"adapter_path": str(checkpoint)})
        assert loaded.status_code == 200, loaded.text
        bodies = [GenerateRequest(prompt=TokenPrompt(prompt), sampling=greedy).to_body() for prompt in prompts]
        served = [client.post(f"{url}/generate", json=body).json()["token_ids"][0] for body in bodies]
    assert plain_answers(export, prompts) == served
    assert plain_answers(checkpoint, prompts[:2]) == served[:2]
    assert plain_answers(released_model, prompts) != served


def plain_answers(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers of transformers, in float32 as the server's."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    end = model.generation_config.eos_token_id
    rows = [
        model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=end)[0, len(prompt) :]
        for prompt in prompts
    ]
    return [row.tolist() for row in rows]
