"""Held-out questions answered by plain transformers: `python scripts/held_out.py word_problems FOLDER`.

FOLDER is a model, a checkpoint or an export, as transformers loads it. Other flags are those of `grpo env NAME
evaluate`. With `--server URL` that server answers the same questions, and different answers are counted: evaluations
are greedy, so in float32 a checkpoint's server and its export agree. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM

from environments.base import BaseEnv
from environments.config import ServerConfig, parse_settings, settings_class
from environments.gsm8k_server import Gsm8kEnv
from environments.peers.inference import Completion, Inference, Sampling
from environments.peers.roster import servers
from environments.threads import settled
from environments.tokenizers import load_tokenizer
from environments.word_problems_server import WordProblemsEnv
from grpo_trainer.config.adapter_file import CONFIG_FILE

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

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        raise NotImplementedError("an evaluation needs none")

    async def close(self) -> None: ...


class Recorded:
    """An inference server whose answers are kept: `answers`, by prompt."""

    def __init__(self, server: Inference) -> None:
        self._server = server
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.prompt_logprobs, self.close = server.prompt_logprobs, server.close

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        completions = await self._server.generate(prompt_token_ids, n, sampling)
        self.answers[tuple(prompt_token_ids)] = completions[0].token_ids
        return completions


async def evaluate(name: str, tokenizer: str, server: Inference, flags: Sequence[str] = ()) -> dict[str, float]:
    """Return the metrics of the environment's evaluation.

    Args:
        tokenizer: the folder that has it.
        flags: as `grpo env NAME evaluate` has them.
    """
    env_cls = ENVIRONMENTS[name]
    given = ["--env.tokenizer_name", tokenizer, *flags]
    settings = parse_settings(settings_class(env_cls.env_config_cls, processes=False), "held_out.py", given)
    env = env_cls(settings.env, server, load_tokenizer(settings.env.tokenizer_name))
    try:
        await settled(env.setup())
        return await env.evaluate()
    finally:
        await env.close()
        await server.close()


def tokenizer_folder(folder: str) -> str:
    """Return the folder with a model's tokenizer; that of an adapter is its base model's."""
    config = Path(folder) / CONFIG_FILE
    return json.loads(config.read_text())["base_model_name_or_path"] if config.is_file() else folder


def differences(one: Recorded, other: Recorded) -> int:
    """Return the number of questions with different answers."""
    return sum(answer != other.answers[prompt] for prompt, answer in one.answers.items())


def main(words: Sequence[str] | None = None) -> None:
    """Print the evaluation, and with `--server` the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ENVIRONMENTS)
    parser.add_argument("folder", metavar="FOLDER", help="model, checkpoint or export, with a tokenizer")
    parser.add_argument("--server", metavar="URL", help="server to compare with, such as http://127.0.0.1:9001")
    given, flags = parser.parse_known_args(words)
    tokenizer = tokenizer_folder(given.folder)
    plain = Recorded(PlainTransformers(given.folder))
    found: dict[str, Any] = {"transformers": asyncio.run(evaluate(given.name, tokenizer, plain, flags))}
    if given.server:
        served = Recorded(servers(ServerConfig(base_url=given.server), patience=60.0))
        found["server"] = asyncio.run(evaluate(given.name, tokenizer, served, flags))
        found["different_answers"] = differences(plain, served)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
