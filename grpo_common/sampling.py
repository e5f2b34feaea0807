"""Which ways of sampling a trainer can reproduce: the rules, for the server and the trainer. Pure.

A trainer learns from tokens whose probability it can compute itself. It divides its logits by the temperature.
Everything else that changes the distribution is refused here. Evaluations may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any, Final

from grpo_common.errors import Problem

LEAST_TEMPERATURE: Final = 1e-5
"""Below it servers sample nothing but the likeliest token (vLLM's `_SAMPLING_EPS`)."""

_BENDING: Final[Mapping[str, object]] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "min_new_tokens": 0,
    "typical_p": 1,
    "logit_bias": None,
    "bad_words": None,
    "allowed_token_ids": None,
    "logits_processors": None,
    "custom_logit_processor": None,
    "thinking_token_budget": None,
    "structured_outputs": None,
    "guided_decoding": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "response_format": None,
    "use_beam_search": False,
}
"""Sampling parameters of vLLM and OpenAI's API that change probabilities, and the value at which each changes nothing.
Sequences and mappings without entries change nothing either."""


CUTS: Final[Mapping[str, Callable[[float], bool]]] = {
    "top_p": lambda p: p < 1,
    "top_k": lambda k: k >= 1,
    "min_p": lambda p: p > 0,
}
"""Sampling parameters with which servers sample from a part of the vocabulary, and whether a value does so."""

WHOLE_VOCABULARY: Final = "training samples from the whole vocabulary; evaluate() may use it (docs/training.md)"


def cuts(params: Mapping[str, Any]) -> dict[str, float]:
    """Return the parameters that leave out tokens: `top_p` below 1, `top_k` above 0, `min_p` above 0."""
    given = {name: params.get(name) for name in CUTS}
    numbers = {name: v for name, v in given.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {name: number for name, number in numbers.items() if CUTS[name](number)}


def bends(params: Mapping[str, Any]) -> Problem | None:
    """Return the first parameter with which tokens can't be trained on; None: there is none."""
    temperature = params.get("temperature")
    if isinstance(temperature, int | float) and not temperature >= LEAST_TEMPERATURE:
        return Problem(
            "temperature", f"{temperature:g}", f"{LEAST_TEMPERATURE:g} or more: at 0 nothing is sampled",
            "sample with a temperature; evaluations may be greedy",
        )  # fmt: skip
    found: dict[str, Any] = {**cuts(params)}
    for name, neutral in _BENDING.items():
        value = params.get(name)
        is_text = isinstance(value, Mapping) and value.get("type") == "text"  # OpenAI's `response_format` for text
        if not (value is None or value == neutral or is_text or (isinstance(value, Sized) and not len(value))):
            found[name] = value
    for name, value in found.items():
        fix = "leave it out in training; evaluations may use it"
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:59] + "…"
        return Problem(name, shown, "none: the trainer can't reproduce its probabilities", fix)
    return None
