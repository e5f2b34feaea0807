"""`--log-samples`: a few of each step's sequences in samples.jsonl, as text, with their rewards and ratios.

One JSON object a sequence:

    {"format": 1, "step": 3, "version": 2, "environment": 0, "group": 5, "reward": 1.0, "advantage": 0.7,
     "prompt": "1+2=", "pieces": ["3", "\\n"], "ratios": [1.02, null], "trained": [true, false], "cut": 0}

`pieces` is what follows the prompt, token by token (or tokens that make up one character); `ratios` is what the policy
that is trained gives each of them over what the server sampled with, null where either is unknown; `cut` counts tokens
that were left out at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from grpo_common.formats import KEY, ROWS_FORMAT
from grpo_trainer.batch.advantages import group_advantages, is_zero_variance
from grpo_trainer.config.train import LossConfig, TrainConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import SAMPLES_FILE
from grpo_trainer.metrics.rows import keep_steps
from grpo_trainer.rollouts.types import Group, Sample

if TYPE_CHECKING:
    import torch

    from grpo_trainer.engine.forward import Forward

LONGEST_PROMPT, LONGEST_ANSWER = 2000, 2000
"""Tokens of each that are kept; of a prompt the last ones."""
HALF_CHARACTER = "\ufffd"

Decode = Callable[[list[int]], str]
Logprobs = Callable[[Sample, NDArray[np.int64]], NDArray[np.float32]]
"""The trained policy's logprobs of a sample's tokens at some positions."""


@dataclass(frozen=True)
class Chosen:
    """A sequence that is to be logged."""

    group: int
    sample: Sample
    environment: int | None
    advantage: float


class SampleLog:
    """Writes some of a batch's sequences before the step on it.

    Args:
        count: how many each step.
        steps_done: rows of later steps, which a resumed run takes again, are dropped.
        longest: tokens after this many are not trained on, and have no ratio.
    """

    def __init__(
        self,
        path: Path,
        count: int,
        config: LossConfig,
        decode: Decode,
        logprobs: Logprobs,
        steps_done: int = 0,
        *,
        longest: int,
    ) -> None:
        self._count, self._config, self._decode, self._logprobs = count, config, decode, logprobs
        self._longest = longest
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_steps(path, steps_done)

    def take(self, step: int, groups: Sequence[Group]) -> None:
        """Log of the groups that are about to become `step` (from 1)."""
        chosen = choose(groups, self._count, self._config)
        lines = [json.dumps(self._record(step, each), ensure_ascii=False) for each in chosen]
        with self._path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def _record(self, step: int, chosen: Chosen) -> dict[str, Any]:
        """Return a line of samples.jsonl; see the top of this file."""
        sample = chosen.sample
        trained = np.flatnonzero(sample.trained_T)
        start = int(trained[0]) if len(trained) else len(sample.tokens_T)
        end = min(len(sample.tokens_T), start + LONGEST_ANSWER)
        ratios = self._ratios(sample, trained[(trained > 0) & (trained < min(end, self._longest))])
        spans = list(whole_characters(sample.tokens_T[start:end].tolist(), self._decode))
        places = [start + stop - 1 for _, stop in spans]  # a piece stands for its last token
        return {
            KEY: ROWS_FORMAT,
            "step": step,
            "version": sample.policy_version,
            "environment": chosen.environment,
            "group": chosen.group,
            "reward": sample.reward,
            "advantage": chosen.advantage,
            "prompt": self._decode(sample.tokens_T[max(0, start - LONGEST_PROMPT) : start].tolist()),
            "pieces": [text for text, _ in spans],
            "ratios": [ratios.get(place) for place in places],
            "trained": [bool(sample.trained_T[place]) for place in places],
            "cut": len(sample.tokens_T) - end,
        }

    def _ratios(self, sample: Sample, positions: NDArray[np.int64]) -> dict[int, float]:
        if sample.rollout_logprobs_T is None or sample.supervised or not len(positions):
            return {}
        own = self._logprobs(sample, positions)
        values = np.exp(own - sample.rollout_logprobs_T[positions])
        return {int(at): round(float(value), 4) for at, value in zip(positions, values, strict=True)}


def choose(groups: Sequence[Group], count: int, config: LossConfig) -> list[Chosen]:
    """Of each group its best and its worst, groups that teach something first."""
    order = sorted(range(len(groups)), key=lambda at: not groups[at].rewards or is_zero_variance(groups[at].rewards))
    found: list[Chosen] = []
    for at in order:
        group = groups[at]
        own = group.advantages(group_advantages(group.rewards, config.advantage_scale, config.advantage_estimator))
        all_of_it = [
            Chosen(at, sample, group.environment, _advantage(sample, value))
            for sample, value in zip(group.samples, own, strict=True)
            if not sample.unscored
        ]
        if not all_of_it:
            continue
        best = max(all_of_it, key=lambda each: each.sample.reward)
        worst = min(all_of_it, key=lambda each: each.sample.reward)
        found += [best] if best is worst else [best, worst]
        if len(found) >= count:
            break
    return found[:count]


def _advantage(sample: Sample, of_group: float) -> float:
    """The mean over trained tokens of the environment's own, where it gave them."""
    given = sample.advantages_T
    if given is None or not sample.trained_T.any():
        return round(float(of_group), 4)
    return round(float(given[sample.trained_T].mean()), 4)


def whole_characters(tokens: Sequence[int], decode: Decode) -> Iterator[tuple[str, int]]:
    """Texts that make up the tokens' text, each with the number of tokens up to its end.

    Tokens may hold parts of a character: they wait for the rest, four bytes at most.
    """
    begin = 0
    for stop in range(1, len(tokens) + 1):
        text = decode(list(tokens[begin:stop]))
        if not text.endswith(HALF_CHARACTER) or stop - begin >= 4 or stop == len(tokens):
            yield text, stop
            begin = stop


def policy_logprobs(forward: Forward, device: torch.device) -> Logprobs:
    """By the trainer's own forward passes, one sequence at a time."""
    import torch

    from grpo_trainer.batch.microbatches import TrainingSequence, split
    from grpo_trainer.engine.forward import evaluating

    @torch.no_grad()
    def logprobs(sample: Sample, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        sequence = TrainingSequence(
            tokens_T=sample.tokens_T[: positions[-1] + 1],
            positions=positions,
            advantages=np.zeros(len(positions), np.float32),
            rollout_logprobs=None,
            weight=0.0,
            temperature=sample.temperature,
            masks=None if sample.masks is None else sample.masks.at(positions),
        )
        (microbatch,) = split([sequence], 1, packed=forward.packed)
        with evaluating(forward.model):
            return forward.scores(microbatch.to(device)).logprobs_N.cpu().numpy()

    return logprobs


def build_sample_log(config: TrainConfig, forward: Forward, device: torch.device, steps_done: int) -> SampleLog | None:
    """What `--log-samples` asks for, with the model's own tokenizer.

    Raises:
        ConfigError: the model has no tokenizer.
    """
    if not (count := config.logging.log_samples):
        return None
    path, decode, own = config.log_dir / SAMPLES_FILE, _tokenizer(config.model.name), policy_logprobs(forward, device)
    return SampleLog(path, count, config.loss, decode, own, steps_done, longest=config.model.seq_len)


def _tokenizer(name: str) -> Decode:
    from grpo_trainer.model.tokenizer import NoTokenizerError, read_tokenizer

    try:
        tokenizer = read_tokenizer(name)
    except NoTokenizerError as error:
        raise ConfigError(
            str(error),
            field="--log-samples",
            got="no tokenizer",
            wanted="the model's own",
            fix="save it in the model's folder, or give 0",
        ) from None
    return lambda tokens: str(tokenizer.decode(tokens))
