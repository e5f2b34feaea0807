"""Word problems in English, made up by rules: problems, answers, levels and which level comes next, as pure functions.

    Tom has 7 apples. He buys 5 more. How many apples does Tom have now?

A problem begins with a number of things and changes it by one to three steps. Held-out problems have other sentences,
names and things than those to train on: a model that solves them has not learnt the sentences.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from environments.maths.answer_form import last_number

Part = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class Level:
    """How hard problems are.

    Attributes:
        steps: How many times the number changes.
        largest: Numbers are from 2 to this; factors, which are less, to 12 at most.
        distractors: Sentences with a number that has nothing to do with the question.
    """

    steps: int
    largest: int
    distractors: int = 0


LEVELS: Mapping[int, Level] = {
    1: Level(steps=1, largest=20),
    2: Level(steps=1, largest=100),
    3: Level(steps=2, largest=20),
    4: Level(steps=2, largest=100),
    5: Level(steps=3, largest=50),
    6: Level(steps=3, largest=100, distractors=1),
}
LARGEST_FACTOR = 12


@dataclass(frozen=True, slots=True)
class Phrases:
    """The sentences, names and things of one part."""

    people: Sequence[tuple[str, str]]
    things: Sequence[str]
    starts: Sequence[str]
    packs: Sequence[str]
    gains: Sequence[str]
    losses: Sequence[str]
    distractors: Sequence[str]
    questions: Sequence[str]


TRAIN = Phrases(
    people=(("Tom", "He"), ("Anna", "She"), ("Ben", "He"), ("Lucy", "She"), ("Sam", "He"), ("Maria", "She")),
    things=("apples", "books", "stickers", "marbles", "pencils", "cookies"),
    starts=("{name} has {n} {things}.", "{name} owns {n} {things}."),
    packs=("{name} has {k} boxes with {n} {things} each.", "{name} buys {k} bags of {n} {things}."),
    gains=("{they} buys {n} more.", "{they} finds {n} more.", "A friend gives {name} {n} more."),
    losses=("{they} gives away {n}.", "{they} loses {n}.", "{they} sells {n} of them."),
    distractors=("{name} is {n} years old.", "It is {n} days until the holidays.", "A neighbour has {n} chairs."),
    questions=("How many {things} does {name} have now?", "How many {things} are left with {name} in the end?"),
)
HELD_OUT = Phrases(
    people=(("Omar", "He"), ("Julia", "She"), ("Peter", "He"), ("Nina", "She")),
    things=("coins", "shells", "cards", "oranges"),
    starts=("There are {n} {things} in {name}'s basket.", "{name} starts the day with {n} {things}."),
    packs=("{name} fills {k} jars with {n} {things} each.", "{name} carries {k} baskets of {n} {things}."),
    gains=("{they} wins {n} more.", "{n} more are sent to {name}."),
    losses=("{they} drops {n} of them.", "{name}'s brother takes {n}."),
    distractors=("The bus to town takes {n} minutes.", "{name} lives at number {n}."),
    questions=(
        "What is the number of {things} that {name} has after that?",
        "How many {things} does {name} hold at last?",
    ),
)
PHRASES: Mapping[Part, Phrases] = {"train": TRAIN, "held_out": HELD_OUT}


@dataclass(frozen=True, slots=True)
class WordProblem:
    """One problem and the whole number that solves it."""

    level: int
    text: str
    answer: int


def make_problem(level: int, part: Part, rng: random.Random) -> WordProblem:
    """A problem of a level (a key of `LEVELS`); what comes of `rng` decides all of it."""
    hardness, phrases = LEVELS[level], PHRASES[part]
    (name, they), things = rng.choice(phrases.people), rng.choice(phrases.things)
    words = {"name": name, "they": they, "things": things}
    number = rng.randint(2, hardness.largest)
    steps = hardness.steps
    if rng.random() < 1 / 3:  # the first step multiplies
        factor = rng.randint(2, min(hardness.largest, LARGEST_FACTOR))
        number = rng.randint(2, min(hardness.largest, LARGEST_FACTOR))
        sentences = [rng.choice(phrases.packs).format(k=factor, n=number, **words)]
        number, steps = factor * number, steps - 1
    else:
        sentences = [rng.choice(phrases.starts).format(n=number, **words)]
    for _ in range(steps):
        change = rng.randint(2, hardness.largest)
        if change < number and rng.random() < 1 / 2:
            sentences.append(rng.choice(phrases.losses).format(n=change, **words))
            number -= change
        else:
            sentences.append(rng.choice(phrases.gains).format(n=change, **words))
            number += change
    for _ in range(hardness.distractors):
        aside = rng.choice(phrases.distractors).format(n=rng.randint(2, hardness.largest), **words)
        sentences.insert(rng.randint(1, len(sentences)), aside)
    sentences.append(rng.choice(phrases.questions).format(**words))
    return WordProblem(level, " ".join(sentences), number)


def held_out_problems(levels: Sequence[int], count: int) -> list[WordProblem]:
    """`count` problems that are never trained on, the levels in turn; the same ones every time, none of them twice."""
    rng = random.Random("held-out word problems")
    found: dict[str, WordProblem] = {}
    while len(found) < count:
        problem = make_problem(levels[len(found) % len(levels)], "held_out", rng)
        found.setdefault(problem.text, problem)
    return list(found.values())


def is_right(problem: WordProblem, answer: str) -> bool:
    """Whether the last number of an answer is the problem's."""
    number = last_number(answer)
    return number is not None and number.rstrip(".") == str(problem.answer)


def levels_of(said: str) -> list[int]:
    """The levels that `auto`, `3` or `1-2` stand for.

    Raises:
        ValueError: There are no such levels.
    """
    if said == "auto":
        return list(LEVELS)
    first, dash, last = said.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal()) or (dash and not last):
        raise ValueError(said)
    found = list(range(int(first), int(last or first) + 1))
    if not found or not set(found) <= set(LEVELS):
        raise ValueError(said)
    return found


class Ladder:
    """Draws levels at which a policy is right now and then: groups there have rewards that differ.

    Of each level it keeps the mean reward of its recent groups, the newest counting most. Levels whose mean is between
    `LOW` and `HIGH` are drawn alike; where there is none, the easiest level that is not solved. One draw in `PROBE`
    tries the level above the highest of those, so that a policy which has become better is found out.
    """

    LOW, HIGH, PROBE = 0.2, 0.8, 8
    NEWEST = 1 / 16
    """Weight of the newest group in a level's mean."""

    def __init__(self, levels: Sequence[int], means: Mapping[int, float] | None = None) -> None:
        """`means`: of a ladder before this one, by level."""
        self.levels = sorted(levels)
        self.means = {level: mean for level, mean in (means or {}).items() if level in levels}

    def note(self, level: int, mean: float) -> None:
        """Take in a group's mean reward, between 0 and 1."""
        before = self.means.get(level)
        self.means[level] = mean if before is None else before + self.NEWEST * (mean - before)

    def candidates(self) -> list[int]:
        """The levels that are drawn alike."""
        mixed = [level for level in self.levels if self.LOW <= self.means.get(level, -1.0) <= self.HIGH]
        if mixed:
            return mixed
        unsolved = [level for level in self.levels if self.means.get(level, 0.0) <= self.HIGH]
        return unsolved[:1] or self.levels[-1:]

    def draw(self, rng: random.Random) -> int:
        """A level for the next group."""
        found = self.candidates()
        above = next((high for low, high in pairwise(self.levels) if low == found[-1]), None)
        if above is not None and rng.randrange(self.PROBE) == 0:
            return above
        return rng.choice(found)
