"""Show scored groups in one self-contained HTML file: prompts, answers, scores, tokens. It loads nothing else."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from statistics import fmean
from typing import Any, Final

from environments.api import wire
from environments.trajectory import trained_tokens
from grpo_common.pages.document import PAGE_STYLE, document

MOST_GROUPS: Final = 200
"""Limit of groups on a page: a browser must hold them in memory."""
STYLE: Final = (
    PAGE_STYLE
    + """
body { max-width: 60rem } .answer { border-top: 1px solid var(--line); padding: .5rem 0 }
.role { display: block; text-transform: uppercase; letter-spacing: .05em }
"""
)


def groups_page(title: str, groups: Sequence[wire.ScoredData]) -> str:
    """Return the page: figures of all groups, then each group with its prompt once and its answers by score."""
    scores = [score for group in groups for score in wire.counted_scores(group)]
    figures = {"groups": f"{len(groups):,}", "answers": f"{len(scores):,}"}
    if scores:
        lengths = [trained_tokens(mask) for group in groups for mask in group.masks]
        same = sum(len(set(wire.counted_scores(group))) <= 1 for group in groups)
        figures |= {"mean score": f"{fmean(scores):.3f}", "scores": f"{min(scores):.3g} to {max(scores):.3g}"}
        figures |= {"mean length in tokens": f"{fmean(lengths):,.1f}"}
        figures["groups that teach"] = f"{1 - same / len(groups):.0%}"
    tiles = (f'<div class="tile"><small>{name}</small><b>{value}</b></div>' for name, value in figures.items())
    body = [f'<h1>{escape(title)}</h1><div class="tiles">{"".join(tiles)}</div>']
    body += [_group(number, group) for number, group in enumerate(groups[:MOST_GROUPS], start=1)]
    if len(groups) > MOST_GROUPS:
        body.append(f'<p class="dim">{len(groups) - MOST_GROUPS} more groups are in the JSONL file.</p>')
    return document(title, "".join(body), style=STYLE)


def _group(number: int, group: wire.ScoredData) -> str:
    conversations = group.messages or [[] for _ in group.scores]
    shared = 0  # first messages that all conversations share; the policy's are never shared, even if equal
    for messages in zip(*conversations, strict=False):
        if messages[0].get("role") == "assistant" or any(message != messages[0] for message in messages):
            break
        shared += 1
    mean = fmean(wire.counted_scores(group) or [0.0])
    order = sorted(range(len(group.scores)), key=lambda index: -group.scores[index])
    answers = "".join(_answer(group, index, conversations[index][shared:], mean) for index in order)
    first = conversations[0][shared - 1].get("content") if shared else None
    opening = escape(textwrap.shorten(_text(first), 100, placeholder=" …")) if first else "no text was kept"
    return (
        f"<details{' open' if number == 1 else ''}><summary><b>{number}</b> · mean {mean:.3f} · {opening}</summary>"
        f"{_messages(conversations[0][:shared])}{answers}</details>"
    )


def _answer(group: wire.ScoredData, index: int, messages: Sequence[dict[str, Any]], mean: float) -> str:
    score, is_unscored = group.scores[index], ((group.overrides or [])[index:] or [{}])[0].get(wire.UNSCORED)
    side = "" if is_unscored or score == mean else "good" if score > mean else "bad"
    version = f", policy {group.policy_versions[index]}" if group.policy_versions else ""
    tokens = f"{trained_tokens(group.masks[index])} of {len(group.tokens[index])} tokens trained{version}"
    shown = "no reward" if is_unscored else f"{score:.3f}"
    return f'<div class="answer"><b class="{side}">{shown}</b> <small>{tokens}</small>{_messages(messages)}</div>'


def _messages(messages: Sequence[dict[str, Any]]) -> str:
    pairs = [(str(message.get("role")), _text(message.get("content"))) for message in messages]
    extras = [message["extra"] for message in messages if isinstance(message.get("extra"), dict)]
    pairs += [(str(name), str(value)) for extra in extras for name, value in extra.items()]
    return "".join(f'<small class="role">{escape(role)}</small><pre>{escape(text)}</pre>' for role, text in pairs)


def _text(content: Any) -> str:
    """Return a message's content; for a multimodal message, the texts of its parts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
