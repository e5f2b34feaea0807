"""Tests hang on meaning, not on wording: none outside `test_messages*.py` asserts on a sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
SENTENCE = re.compile(r"(?<![\w.\-/])[A-Za-z][a-z']*(?:[ ,]+[a-z']+){2,}(?![\w\-/=])")
"""Three words or more in a row, none of them a flag, a path or a name with a sign in it."""


def asserted(tree: ast.AST) -> Iterator[ast.expr]:
    """Patterns of `match=`, and what an assertion compares."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "match":
            yield node.value
        elif isinstance(node, ast.Assert):
            yield from compared(node.test)


def compared(test: ast.expr) -> Iterator[ast.expr]:
    """What stands on either side of a comparison, or is searched for."""
    searches = ("startswith", "endswith", "search", "match", "fullmatch")
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            yield from [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in searches:
            yield from node.args


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """Line and words of each sentence that is asserted on."""
    for expression in asserted(ast.parse(source)):
        for node in ast.walk(expression):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for found in SENTENCE.findall(node.value.replace("\\", "")):
                    yield node.lineno, found


def test_only_the_tests_of_messages_assert_on_sentences() -> None:
    paths = [path for path in sorted(TESTS.rglob("*.py")) if not path.name.startswith("test_messages")]
    found = [(str(path.relative_to(TESTS)), *one) for path in paths for one in sentences(path.read_text())]
    assert not found


def test_a_planted_sentence_is_found() -> None:
    source = 'with raises(E, match="the server is gone"):\n    pass\nassert "not so many" in str(error)\n'
    planted = ["the server is gone", "not so many"]
    assert sorted(sentences(source)) == [(1, planted[0]), (3, planted[1])]
