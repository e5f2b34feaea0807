"""`--log-samples`: a few of each step's sequences in samples.jsonl, as text, with their rewards and ratios.

One JSON object a sequence:

    {"format": 1, "step": 3, "version": 2, "environment": 0, "group": 5, "reward": 1.0, "advantage": 0.7,
     "prompt": "1+2=", "pieces": ["3", "\\n"], "ratios": [1.02, null], "trained": [true, false], "cut": 0}

`pieces` is what follows the prompt, token by token (or tokens that make up one character); `ratios` is what the policy
that is trained gives each of them over what the server sampled with, null where either is unknown; `cut` counts tokens
that were left out at the end.

The ratios are those of the step's own first forward pass, so samples cost no pass of the model. A sample that the step
does not train on has none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_common.formats import KEY, ROWS_FORMAT
from grpo_common.text import printable
from grpo_trainer.batch.batching import advantages_of, is_zero_variance
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.files import SAMPLES_FILE
from grpo_trainer.metrics.rows import a_sample, keep_steps, read_file
from grpo_trainer.rollouts.groups import Group, Sample

log = logging.getLogger(__name__)

LONGEST_PROMPT, LONGEST_ANSWER = 2000, 2000
"""Tokens of each that are kept; of a prompt the last ones."""
HALF_CHARACTER = "\ufffd"

Decode = Callable[[list[int]], str]
SHOWN_CHARACTERS = 200
"""Characters of a prompt and of an answer in a line for people; of a prompt the last ones."""


@dataclass(frozen=True)
class Chosen:
    """A sequence that is to be logged."""

    number: int
    """Its place among all samples of the batch."""
    group: int
    sample: Sample
    environment: int | None
    advantage: float


class SampleLog:
    """Writes some of a batch's sequences, `count` of them, after the step on it, with the step's own logprobs.

    Rows after `steps_done`, of steps that a resumed run takes again, are dropped. Tokens after the first
    `longest` are not trained on, and have no ratio.
    """

    def __init__(
        self, path: Path, count: int, config: LossConfig, decode: Decode, steps_done: int = 0, *, longest: int
    ) -> None:
        self._path, self._count, self._config = path, count, config
        self._decode, self._longest, self._chosen = decode, longest, list[Chosen]()
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_steps(path, steps_done)

    def choose(self, groups: Sequence[Group]) -> tuple[int, ...]:
        """Choose samples of a batch for `write`; return their numbers in it."""
        self._chosen = choose(groups, self._count, self._config)
        return tuple(chosen.number for chosen in self._chosen)

    def write(self, step: int, logprobs: Mapping[int, NDArray[np.float32]]) -> str:
        """Write the chosen samples after a step (from 1), and return the first as a line for people; empty: none.

        `logprobs` are the trained policy's of each sample's trained tokens, by the sample's number; a sample that the
        step does not train on has none.
        """
        records = [self._record(step, each, logprobs.get(each.number)) for each in self._chosen]
        self._chosen = []  # each is written once
        with self._path.open("a") as file:
            file.write("".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))
        return in_words(records[0]) if records else ""

    def _record(self, step: int, chosen: Chosen, logprobs: NDArray[np.float32] | None) -> dict[str, Any]:
        """Return a line of samples.jsonl; see the top of this file."""
        sample = chosen.sample
        trained = set(sample.positions.tolist())
        start = sample.start if sample.start is not None else min(trained, default=len(sample.tokens_T))
        end = min(len(sample.tokens_T), start + LONGEST_ANSWER)
        ratios: dict[int, float] = {}  # what the policy gives each trained token over what the server sampled with
        cut = sample.cut(self._longest)
        if logprobs is not None and cut.rollout_logprobs is not None and not cut.supervised:
            values = np.exp(logprobs - cut.rollout_logprobs)
            ratios = {int(at): round(float(value), 4) for at, value in zip(cut.positions, values, strict=True)}
        spans = list(whole_characters(sample.tokens_T[start:end].tolist(), self._decode))
        places = [start + stop - 1 for _, stop in spans]  # a piece stands for its last token
        return {
            **{KEY: ROWS_FORMAT, "step": step, "version": sample.version, "environment": chosen.environment},
            **{"group": chosen.group, "reward": sample.reward, "advantage": chosen.advantage},
            "prompt": self._decode(sample.tokens_T[max(0, start - LONGEST_PROMPT) : start].tolist()),
            "pieces": [text for text, _ in spans],
            "ratios": [ratios.get(place) for place in places],
            "trained": [place in trained for place in places],
            "cut": len(sample.tokens_T) - end,
        }


def in_words(record: Mapping[str, Any]) -> str:
    """Return a line of samples.jsonl for people: the end of its prompt, the beginning of its answer, its reward."""
    prompt, answer = str(record["prompt"]), "".join(map(str, record["pieces"]))
    begin = "…" if len(prompt) > SHOWN_CHARACTERS else ""
    prompt, answer = printable(prompt[-SHOWN_CHARACTERS:]), printable(answer, SHOWN_CHARACTERS)
    return f'prompt "{begin}{prompt}", answer "{answer}", reward {record["reward"]:g}'


def last_sample(path: Path) -> str:
    """Return the last step's first sample for people; empty: none was logged."""
    rows = read_file(path, a_sample).rows
    return in_words(next(row for row in rows if row["step"] == rows[-1]["step"])) if rows else ""


def choose(groups: Sequence[Group], count: int, config: LossConfig) -> list[Chosen]:
    """Of each group its best and its worst, groups that teach something first."""
    order = sorted(range(len(groups)), key=lambda at: not groups[at].rewards or is_zero_variance(groups[at].rewards))
    found: list[Chosen] = []
    for at in order:
        group, first, scored = groups[at], sum(len(before.samples) for before in groups[:at]), list[Chosen]()
        for place, (sample, value) in enumerate(zip(group.samples, advantages_of(group, config), strict=True)):
            own = sample.advantages  # the environment's, where it gave them: the mean over trained tokens
            advantage = round(float(value if own is None or not len(own) else own.mean()), 4)
            if not sample.unscored:
                scored.append(Chosen(first + place, at, sample, group.environment, advantage))
        if scored:
            best = max(scored, key=lambda each: each.sample.reward)
            worst = min(scored, key=lambda each: each.sample.reward)
            found += [best] if best is worst else [best, worst]
        if len(found) >= count:
            break
    return found[:count]


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


def build_sample_log(config: TrainConfig, steps_done: int) -> SampleLog | None:
    """Return what writes the samples that `--log-samples` asks for, with the model's tokenizer.

    Without a tokenizer no samples are logged, and a warning says so.
    """
    from grpo_trainer.model.load import NoTokenizerError, read_tokenizer

    if not (count := config.log_samples):
        return None
    try:
        tokenizer = read_tokenizer(config.model_name)
    except NoTokenizerError as error:
        log.warning("no samples are logged: %s; save a tokenizer in the model's folder, or use --log-samples 0", error)
        return None
    tokenizer.clean_up_tokenization_spaces = False  # samples are shown as they were sampled
    single = lru_cache(maxsize=1 << 16)(lambda token: str(tokenizer.decode([token])))

    def decode(tokens: list[int]) -> str:
        return single(tokens[0]) if len(tokens) == 1 else str(tokenizer.decode(tokens))

    return SampleLog(config.log_dir / SAMPLES_FILE, count, config, decode, steps_done, longest=config.seq_len)
