"""Held-out questions answered by plain transformers: `python scripts/benchmarks/held_out.py word_problems FOLDER`.

FOLDER is a model, a checkpoint or an export, as transformers loads it. Other flags are those of `grpo env NAME
evaluate`. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from environments.base import BaseEnv
from environments.config import Settings, parse_settings
from environments.gsm8k import Gsm8kEnv
from environments.peers.http import Answer
from environments.peers.inference import Completion, Inference, Sampling
from environments.scoring import settled
from environments.tokenizers import load_tokenizer
from environments.word_problems import WordProblemsEnv
from grpo_trainer.config.bridge import CONFIG_FILE

ENVIRONMENTS: dict[str, type[BaseEnv[Any, Any]]] = {"gsm8k": Gsm8kEnv, "word_problems": WordProblemsEnv}
ROWS = {"cuda": 512, "cpu": 64}
"""Questions in one call of `generate`."""


class PlainTransformers:
    """Greedy answers of a folder's model, in place of an inference server."""

    def __init__(self, folder: str) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self._model = model.to(device).eval()
        self._rows = ROWS[device]
        ends = self._model.generation_config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else set(ends)
        self._waiting: list[tuple[list[int], int, asyncio.Future[Completion]]] = []

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return the greedy answer `n` times. Questions that are asked together are answered in batches."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt_token_ids, sampling.max_tokens, answer))
        await asyncio.sleep(0)  # until all questions of one `asyncio.gather` wait here
        asked, self._waiting = sorted(self._waiting, key=lambda each: len(each[0])), []
        for start in range(0, len(asked), self._rows):
            self._answer(asked[start : start + self._rows])
        return [await answer] * n

    @torch.inference_mode()
    def _answer(self, asked: Sequence[tuple[list[int], int, asyncio.Future[Completion]]]) -> None:
        longest = max(len(prompt) for prompt, _, _ in asked)
        pad = min(self._ends)
        tokens_BT = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt, _, _ in asked])
        mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _, _ in asked])
        output_BT = self._model.generate(
            input_ids=tokens_BT.to(self._model.device),
            attention_mask=mask_BT.to(self._model.device),
            max_new_tokens=max(limit for _, limit, _ in asked),
            do_sample=False,
            pad_token_id=pad,
        )
        for (prompt, limit, answer), row in zip(asked, output_BT[:, longest:].tolist(), strict=True):
            length = next((at for at, token in enumerate(row[:limit], 1) if token in self._ends), None)
            reason = "length" if length is None else "stop"
            answer.set_result(Completion(prompt, row[: length or limit], [], "", reason, None))

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        """Refuse: evaluations ask for tokens."""
        raise NotImplementedError

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        raise NotImplementedError("an evaluation needs none")

    async def close(self) -> None: ...


async def evaluate(name: str, tokenizer: str, server: Inference, flags: Sequence[str] = ()) -> dict[str, float]:
    """Return the metrics of the environment's evaluation.

    Args:
        tokenizer: the folder that has it.
        flags: as `grpo env NAME evaluate` has them.
    """
    env_cls = ENVIRONMENTS[name]
    given = ["--env.tokenizer_name", tokenizer, *flags]
    settings = parse_settings(Settings[env_cls.env_config_cls], "held_out.py", given)
    env = env_cls(settings.env, server, load_tokenizer(settings.env.tokenizer_name))
    try:
        await settled(env.setup())
        return await env.evaluate()
    finally:
        await env.close()
        await server.close()


def main() -> None:
    """Print the evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ENVIRONMENTS)
    parser.add_argument("folder", metavar="FOLDER", help="model, checkpoint or export, with a tokenizer")
    given, flags = parser.parse_known_args()
    adapter = Path(given.folder) / CONFIG_FILE  # an adapter has the tokenizer of its base model
    tokenizer = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.is_file() else given.folder
    print(json.dumps(asyncio.run(evaluate(given.name, tokenizer, PlainTransformers(given.folder), flags))))


if __name__ == "__main__":
    main()
