"""Show scored groups in one self-contained HTML file: prompts, answers, scores, tokens. It loads nothing else."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

from environments.api import wire
from environments.trajectory import trained_tokens
from grpo_common.pages.document import PAGE_STYLE, document

BARS: Final = 20
MOST_GROUPS: Final = 200
"""Limit of groups on a page: a browser must hold them in memory."""

STYLE: Final = (
    PAGE_STYLE
    + """
body { max-width: 60rem } .bars { width: 100%; height: 5rem; border-bottom: 1px solid var(--line); fill: var(--c0) }
.scale { display: flex; justify-content: space-between } .answer { border-top: 1px solid var(--line); padding: .5rem 0 }
.role { display: block; text-transform: uppercase; letter-spacing: .05em }
"""
)


def groups_page(title: str, groups: Sequence[wire.ScoredData]) -> str:
    """Return the page: figures of all groups, then each group with its prompt once and its answers by score."""
    scores = [score for group in groups for score in wire.counted_scores(group)]
    body = [f"<h1>{html.escape(title)}</h1>", _figures(groups, scores), _histogram(scores)]
    body += [_group(number, group) for number, group in enumerate(groups[:MOST_GROUPS], start=1)]
    if len(groups) > MOST_GROUPS:
        body.append(f'<p class="dim">{len(groups) - MOST_GROUPS} more groups are in the JSONL file.</p>')
    return document(title, "".join(body), style=STYLE)


def _figures(groups: Sequence[wire.ScoredData], scores: Sequence[float]) -> str:
    lengths = [trained_tokens(mask) for group in groups for mask in group.masks]
    same = sum(len(set(wire.counted_scores(group))) <= 1 for group in groups)
    figures = {"groups": f"{len(groups):,}", "answers": f"{len(scores):,}"}
    if scores:
        figures |= {"mean score": f"{fmean(scores):.3f}", "mean length in tokens": f"{fmean(lengths):,.1f}"}
        figures["groups that teach"] = f"{1 - same / len(groups):.0%}"
    tiles = (f'<div class="tile"><small>{name}</small><b>{value}</b></div>' for name, value in figures.items())
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _histogram(scores: Sequence[float]) -> str:
    if not scores:
        return ""
    low, high = min(scores), max(scores)
    counts = [0] * BARS
    for score in scores:
        counts[min(BARS - 1, int((score - low) / (high - low) * BARS)) if high > low else 0] += 1
    bars = "".join(
        f'<rect x="{at}" y="{1 - count / max(counts):.3f}" width="0.9" height="{count / max(counts):.3f}">'
        f"<title>{count}</title></rect>"
        for at, count in enumerate(counts)
    )
    return (
        f'<svg class="bars" viewBox="0 0 {BARS} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="Scores from {low:.3g} to {high:.3g}">{bars}</svg>'
        f'<div class="scale dim"><span>{low:.3g}</span><span>score</span><span>{high:.3g}</span></div>'
    )


def _group(number: int, group: wire.ScoredData) -> str:
    conversations = group.messages or [[] for _ in group.scores]
    shared = _shared(conversations)
    mean = fmean(wire.counted_scores(group) or [0.0])
    order = sorted(range(len(group.scores)), key=lambda index: -group.scores[index])
    answers = "".join(_answer(group, index, conversations[index][shared:], mean) for index in order)
    first = conversations[0][shared - 1].get("content") if shared else None
    opening = html.escape(textwrap.shorten(_text(first), 100, placeholder=" …")) if first else "no text was kept"
    return (
        f"<details{' open' if number == 1 else ''}><summary><b>{number}</b> · mean {mean:.3f} · {opening}</summary>"
        f"{_messages(conversations[0][:shared])}{answers}</details>"
    )


def _shared(conversations: Sequence[Sequence[dict[str, Any]]]) -> int:
    """Return how many first messages all conversations share. The policy's messages are never shared, even if equal."""
    shared = 0
    for messages in zip(*conversations, strict=False):
        if messages[0].get("role") == "assistant" or any(message != messages[0] for message in messages):
            break
        shared += 1
    return shared


def _answer(group: wire.ScoredData, index: int, messages: Sequence[dict[str, Any]], mean: float) -> str:
    score, mark = group.scores[index], ((group.overrides or [])[index:] or [{}])[0].get(wire.UNSCORED)
    trained = trained_tokens(group.masks[index])
    side = "" if mark or score == mean else "good" if score > mean else "bad"
    version = f", policy {group.policy_versions[index]}" if group.policy_versions else ""
    return (
        f'<div class="answer"><b class="{side}">{"no reward" if mark else f"{score:.3f}"}</b> <small>{trained} of '
        f"{len(group.tokens[index])} tokens trained{version}</small>{_messages(messages)}</div>"
    )


def _messages(messages: Sequence[dict[str, Any]]) -> str:
    pairs = [(str(message.get("role")), _text(message.get("content"))) for message in messages]
    extras = [message["extra"] for message in messages if isinstance(message.get("extra"), dict)]
    pairs += [(str(name), str(value)) for extra in extras for name, value in extra.items()]
    return "".join(
        f'<small class="role">{html.escape(role)}</small><pre>{html.escape(text)}</pre>' for role, text in pairs
    )


def _text(content: Any) -> str:
    """Return a message's content; for a multimodal message, the texts of its parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
