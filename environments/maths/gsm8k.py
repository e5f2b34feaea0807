"""GSM8K: rows, prompts and length penalty, without servers and judges.

Source: K. Cobbe et al., Training Verifiers to Solve Math Word Problems, arXiv 2110.14168. Its solutions end in
`#### NUMBER`.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from environments.config import ConfigError
from environments.maths.answer_form import AnswerForm, in_the_asked_form, read_number

Split = Literal["train", "test"]

ASKED: Final[dict[AnswerForm, str]] = {
    "boxed": "Think step by step, then give the final answer, a number, as \\boxed{answer}.",
    "hashes": "Think step by step, then give the final answer, a number, on a line of its own after ####.",
}
PERCENT_ASKED: Final = re.compile(r"\b(what|which|how many) ((is|was|are|were|will be) )?(the )?percent", re.IGNORECASE)


class _Row(msgspec.Struct, frozen=True):
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Question:
    """One exercise and the number that solves it."""

    text: str
    gold: str

    @classmethod
    def of(cls, question: str, answer: str) -> Question:
        """Return the question of a row of the data set.

        Solutions write no units. If the question asks for a percentage, the number is one: 60 and 60 % are right.

        Raises:
            ValueError: The solution does not end in `#### NUMBER`.
        """
        gold = in_the_asked_form(answer, "hashes")
        number = None if gold is None else read_number(gold)
        if number is None:
            raise ValueError(f"a solution that does not end in '#### NUMBER': {answer[-60:]!r}")
        asks_percent = PERCENT_ASKED.search(question) is not None and not number.percent
        return cls(question, number.text + ("%" if asks_percent else ""))


def read_questions(path: Path, split: Split) -> list[Question]:
    """Return the questions in `path/SPLIT.jsonl`. For the training split `path` may also be the file itself.

    Raises:
        ConfigError: There is no such file, or a line is not a row of GSM8K.
    """
    file = path / f"{split}.jsonl" if path.is_dir() else path
    if not file.is_file() or (split == "test" and file == path):
        raise ConfigError(
            field="--env.dataset_path",
            got=path,
            wanted=f'a folder with {split}.jsonl, one {{"question": …, "answer": "… #### 18"}} a line',
        )
    questions = []
    for number, line in enumerate(file.read_bytes().removeprefix(BOM_UTF8).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Row)
            questions.append(Question.of(row.question, row.answer))
        except ValueError as error:  # includes msgspec's errors
            raise ConfigError(
                field=f"--env.dataset_path {file}, line {number}", got=error, wanted="a row of GSM8K"
            ) from None
    return questions


def download_questions(name: str, split: Split) -> list[Question]:
    """Return the questions of a data set on the hub.

    Raises:
        ConfigError: `datasets` is not installed, or the hub does not return them.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigError(
            "is not set, and `datasets`, which downloads from the hub, is not installed",
            field="--env.dataset_path",
            fix="pip install datasets, or name a folder with train.jsonl and test.jsonl",
        ) from None
    field = f"--env.dataset_name {name}"
    try:
        rows = load_dataset(name, "main", split=split).to_list()
    except (OSError, ValueError) as error:  # no network, no such data set
        reason = str(error).splitlines()[0]
        raise ConfigError(
            "cannot be loaded",
            field=field,
            got=reason,
            fix="set --env.dataset_path to a folder with train.jsonl and test.jsonl",
        ) from None
    questions = []
    for number, row in enumerate(rows, start=1):
        try:
            questions.append(Question.of(str(row["question"]), str(row["answer"])))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                field=f"{field}, row {number} of {split}", got=str(error), wanted="a row of GSM8K"
            ) from None
    return questions


def too_long(tokens: int, room: int, free: float) -> float:
    """Return how much of the penalised part of its room an answer uses: 0 up to the share `free`, 1 at the end.

    Linear, as in C. Yu et al., DAPO, arXiv 2503.14476, section 3.4.
    """
    start = free * room
    if tokens <= start:
        return 0.0
    return 1.0 if tokens >= room else (tokens - start) / (room - start)
