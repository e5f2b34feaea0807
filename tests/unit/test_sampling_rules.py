"""Ways of sampling that a trainer can't reproduce."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_common.sampling import bends, cuts

PLAIN: dict[str, Any] = {
    "temperature": 0.7,
    "max_tokens": 5,
    "stop": ["x"],
    "seed": 3,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "logit_bias": {},
    "bad_words": [],
    "structured_outputs": None,
    "response_format": {"type": "text"},
    "ignore_eos": True,
}


def test_plain_sampling_and_temperature_are_reproduced() -> None:
    assert bends(PLAIN) is None and bends({}) is None and cuts(PLAIN) == {}


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("temperature", 0, "0"),
        ("temperature", 1e-6, "1e-06"),
        ("top_p", 0.9, "0.9"),
        ("top_k", 5, "5"),
        ("top_k", 1, "1"),
        ("min_p", 0.05, "0.05"),
        ("min_p", 1, "1"),
        ("presence_penalty", 0.5, "0.5"),
        ("frequency_penalty", -0.5, "-0.5"),
        ("repetition_penalty", 1.1, "1.1"),
        ("min_tokens", 4, "4"),
        ("logit_bias", {"3": 1.0}, "{'3': 1.0}"),
        ("bad_words", ["no"], "['no']"),
        ("allowed_token_ids", [1], "[1]"),
        ("structured_outputs", {"json": {}}, "{'json': {}}"),
        ("guided_regex", "a+", "'a+'"),
        ("response_format", {"type": "json_object"}, "{'type': 'json_object'}"),
    ],
)
def test_what_bends_the_distribution_is_refused_by_name(name: str, value: object, got: str) -> None:
    problem = bends(PLAIN | {name: value})
    assert problem is not None and (problem.field, problem.got) == (name, got)
    assert problem.wanted and problem.fix


@pytest.mark.parametrize("value", [None, "0.9", True, [0.5]])
def test_what_is_no_number_leaves_nothing_out(value: object) -> None:
    """Foreign environments may send anything; the server that sampled has read it otherwise."""
    params = {"top_p": value, "top_k": value, "min_p": value}
    assert cuts(params) == {} and bends(params) is None
