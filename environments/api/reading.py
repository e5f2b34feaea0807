"""From a posted body to a packed group. A long body is read row by row, so that nobody waits for its end."""

import re
from collections.abc import Generator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from environments.api import wire
from environments.api.packing import pack_doubles, pack_ints
from environments.api.validate import (
    InvalidGroup,
    check_packed,
    check_teacher_count,
    check_teacher_row,
    pack_checked,
    spread,
)

LONG_BODY = 1 << 20
"""Bytes from which a group's rows are read one by one; a shorter body takes some 3 ms."""
LONGEST_EXPLAINED = 4 << 20
"""Bytes of JSON in which NaN is looked for exactly; longer ones are refused with the place of the first."""
_COMPLAINT = re.compile(r"(.*) - at `\$\.?(.*)`")
_NON_FINITE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\b(?:NaN|Infinity)\b')
_ROWS = ("tokens", "masks", "advantages", "ref_logprobs", "inference_logprobs")
_INTS = list[Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]]
_MESSAGES = list[dict[str, Any]]

Buffer = bytes | memoryview
Steps = Generator[None, None, wire.PackedGroup]


class _Unread(Struct, kw_only=True):
    """What lists of lists and packed groups are alike in, with long rows left as they came."""

    scores: list[float]
    messages: list[Raw] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    distill_token_ids: list[Raw] | None = None
    distill_logprobs: list[Raw] | None = None
    policy_versions: list[Annotated[int, Meta(ge=-(2**53), le=2**53)]] | None = None


class _UnreadLists(_Unread, kw_only=True):
    """`wire.ScoredData`."""

    tokens: list[Raw]
    masks: list[Raw]
    advantages: list[Raw] | None = None
    ref_logprobs: list[Raw] | None = None
    inference_logprobs: list[Raw] | None = None


class _UnreadPacked(_Unread, kw_only=True):
    """`wire.PackedGroup`."""

    lengths: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]
    tokens: bytes
    masks: bytes
    advantages: bytes | None = None
    ref_logprobs: bytes | None = None
    inference_logprobs: bytes | None = None


def read_group(body: Buffer, msgpack: bool = False) -> Steps:
    """The group that a body carries, checked and packed; a generator that pauses between rows and returns it.

    Raises:
        InvalidGroup: not fit to be trained on, or not a group at all.
        msgspec.DecodeError: not JSON (or not MessagePack).
    """
    read = msgspec.msgpack.decode if msgpack else msgspec.json.decode
    try:
        if msgpack:
            try:
                return (yield from _finished(read(body, type=_UnreadPacked), read))
            except msgspec.ValidationError as error:
                packed = error
            try:  # MessagePack with lists, as a generic client sends it
                unread = read(body, type=_UnreadLists)
            except msgspec.ValidationError as plain:
                # Lists where bytes should be: complain about the plain form. Bytes where lists should be: the packed.
                raise (packed if "got `bytes`" in str(plain) else plain) from None
            return (yield from _read_lists(unread, read))
        if len(body) >= LONG_BODY:
            return (yield from _read_lists(read(body, type=_UnreadLists), read))
        return pack_checked(read(body, type=wire.ScoredData))
    except msgspec.ValidationError as error:
        raise invalid(error) from None


def invalid(error: msgspec.ValidationError, within: str = "") -> InvalidGroup:
    """A decoder's complaint as ours; the path that it names is that of the place `within` the group."""
    message = str(error)
    if match := _COMPLAINT.fullmatch(message):
        return InvalidGroup(within + match[2], match[1])
    missing = re.search(r"missing required field `(\w+)`", message)
    return InvalidGroup(missing[1] if missing and not within else within, message)


def without_nan(body: bytes) -> bytes:
    """JSON with null for NaN and Infinity, which JSON has not: decoding it names the place where they stood.

    Raises:
        InvalidGroup: the body is too long to look at every place; the first one is named.
    """
    first = min((at for name in (b"NaN", b"Infinity") if (at := body.find(name)) >= 0), default=-1)
    if first < 0:
        return body
    if len(body) > LONGEST_EXPLAINED:
        raise InvalidGroup("", f"NaN or Infinity (byte {first}), which JSON does not have")
    return _NON_FINITE.sub(lambda match: match[0] if match[0].startswith(b'"') else b"null", body)


def _read_lists(unread: _UnreadLists, read: Any) -> Steps:
    """Rows of numbers, read and packed one by one."""
    yield
    lengths: list[int] = []
    packed: dict[str, bytes | None] = {}
    for field in _ROWS:
        rows: list[Raw] = getattr(unread, field) or []
        pieces: list[bytes] = []
        got: list[int] = []
        for i, row in enumerate(rows):
            whole = field in ("tokens", "masks")
            numbers: list[Any] = _row(row, _INTS if whole else list[float], field, i, read)
            if field == "advantages" and i < len(lengths):
                numbers = spread(numbers, lengths[i])
            got.append(len(numbers))
            pieces.append((pack_ints if whole else pack_doubles)([numbers]))
            yield
        lengths = lengths or got
        if got != lengths and any(got):
            raise InvalidGroup(field, f"rows of {got} entries, tokens has {lengths}; expected one per token")
        packed[field] = b"".join(pieces) if any(got) or field == "masks" else None
    yield
    others = {name: getattr(unread, name) for name in _Unread.__struct_fields__}
    tokens, masks = packed.pop("tokens") or b"", packed.pop("masks") or b""
    return (yield from _finished(_UnreadPacked(lengths=lengths, tokens=tokens, masks=masks, **packed, **others), read))


def _finished(unread: _UnreadPacked, read: Any) -> Steps:
    """The group, checked. A teacher's rows stay MessagePack: they may hold more numbers than all the rest."""
    yield
    fields: dict[str, Any] = {name: getattr(unread, name) for name in unread.__struct_fields__}
    for i, conversation in enumerate(unread.messages or ()):
        fields["messages"][i] = _row(conversation, _MESSAGES, "messages", i, read)
        yield
    ids, logprobs = unread.distill_token_ids, unread.distill_logprobs
    check_teacher_count(ids, logprobs, len(unread.lengths))
    for i, (some_ids, some_logprobs) in enumerate(zip(ids or (), logprobs or (), strict=True)):
        id_row = _row(some_ids, list[_INTS], "distill_token_ids", i, read)
        logprob_row = _row(some_logprobs, list[list[float]], "distill_logprobs", i, read)
        check_teacher_row(i, id_row, logprob_row, unread.lengths[i])
        fields["distill_token_ids"][i] = Raw(msgspec.msgpack.encode(id_row))
        fields["distill_logprobs"][i] = Raw(msgspec.msgpack.encode(logprob_row))
        yield
    group = wire.PackedGroup(**fields)
    yield from check_packed(group)
    return group


def _row(raw: Raw, row_type: Any, field: str, i: int, read: Any) -> list[Any]:
    try:
        return read(raw, type=row_type)
    except msgspec.ValidationError as error:
        raise invalid(error, within=f"{field}[{i}]") from None
