"""What the HTTP clients of a run share: time-outs, which failures may pass, and what an error answer says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

CONNECT_S = 10.0
"""Seconds that making a connection may take."""

CLIENT_IDLE_S = 2.0
"""A client does not use an idle connection again after this: plain uvicorn and vLLM close it after 5 s, maybe as a
request is sent; our servers after 75 s."""

_SAYS_NOTHING_OF_THE_REQUEST = frozenset({408, 425, 429, 499})
"""4xx after which the same request may succeed; 499 is a server that ends and takes its clients for gone."""
_NOT_IMPLEMENTED = 501
_LONGEST = 500


def may_pass(status: int) -> bool:
    """Return whether the same request may succeed later: a server in trouble (5xx), or one that is too busy."""
    return status in _SAYS_NOTHING_OF_THE_REQUEST or (status >= 500 and status != _NOT_IMPLEMENTED)


MSGPACK_TYPES = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})


def is_msgpack(content_type: str | None) -> bool:
    """Return whether a `Content-Type` (parameters and case aside) is MessagePack; all else is read as JSON."""
    return content_type is not None and content_type.partition(";")[0].strip().lower() in MSGPACK_TYPES


@dataclass(frozen=True, slots=True)
class Complaint:
    """What an error answer says.

    Attributes:
        reason: all of it in words, at most 500 characters.
        key: the key of the request at fault, where the server names it.
        got, wanted, fix: the parts of the reason, where the server gives them.
    """

    reason: str
    key: str | None = None
    got: str | None = None
    wanted: str = ""
    fix: str = ""


def complaint(body: bytes, content_type: str | None) -> Complaint:
    """Read an error answer: `detail` and `field` (rollout API), `error` (inference server), else its text."""
    packed = is_msgpack(content_type)
    said = _decoded(body, packed)
    if isinstance(error := said.get("error"), dict):
        reason, parts = error.get("message", error), {name: error.get(name) or "" for name in ("wanted", "fix")}
        return Complaint(str(reason)[:_LONGEST], error.get("param"), error.get("got"), **parts)
    if "detail" in said:
        return Complaint(str(said["detail"])[:_LONGEST], said.get("field"))
    text = f"{len(body)} bytes of {content_type}" if packed else body.decode(errors="replace")[:_LONGEST]
    return Complaint(text or "no reason given")


def _decoded(body: bytes, packed: bool) -> dict[str, Any]:
    """Return the object that a body holds; an empty one for anything else."""
    try:
        said = msgspec.msgpack.decode(body) if packed else msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
