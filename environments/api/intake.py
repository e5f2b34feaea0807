"""A posted body becomes groups in the queue; of a list, those that are wrong are named and the others taken.

Reading is pure and runs in any thread. msgspec lets no other thread run while it works: a long body is read in a thread
row by row, so that the event loop waits for one row at most.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw
from msgspec.json import decode as json_decode
from msgspec.msgpack import decode as msgpack_decode

from environments.api import wire
from environments.api.checks import (
    LIST_PER_TOKEN,
    PER_TOKEN,
    WHOLE,
    InvalidGroup,
    Posted,
    check,
    check_count,
    check_lengths,
    check_teacher_row,
    encode_checked,
)
from environments.api.packing import pack_floats, pack_ints
from environments.api.records import ApiError, UnknownEnvironment
from environments.api.service import Service
from grpo_common.errors import Problem

LONG_BODY = 1 << 19
"""Bytes from which a body is read in a thread, row by row; a shorter one takes some 3 ms."""
LONGEST_EXPLAINED = 4 << 20
"""Bytes of JSON in which NaN is looked for exactly; longer ones are refused with the place of the first."""

_COMPLAINT = re.compile(r"(.*) - at `\$\.?(.*)`")
_NON_FINITE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\b(?:NaN|Infinity)\b')
_INTS = list[Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]]
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

Buffer = bytes | memoryview


class _Lists(wire.ScoredData, frozen=True, kw_only=True):
    """`wire.ScoredData` with its rows left encoded."""

    tokens: list[Raw]  # pyright: ignore[reportIncompatibleVariableOverride]
    masks: list[Raw]  # pyright: ignore[reportIncompatibleVariableOverride]
    advantages: list[Raw] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    ref_logprobs: list[Raw] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    inference_logprobs: list[Raw] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    messages: list[Raw] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    distill_token_ids: list[Raw] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    distill_logprobs: list[Raw] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


# Bodies


def decode(body: bytes, message_type: type[wire.T], content_type: str | None) -> wire.T:
    """`wire.decode` with refusals.

    Raises:
        ApiError: 422 naming the field, or 400 for what is no JSON (or MessagePack) at all.
    """
    try:
        return wire.decode(body, message_type, content_type or wire.JSON)
    except msgspec.ValidationError as error:
        raise _refusal(_invalid(error)) from None
    except _UNREADABLE as error:
        raise _malformed(error, content_type) from None


def decode_query(query: Mapping[str, str], query_type: type[wire.T]) -> wire.T:
    """A request's query as a structure of the wire. Raises ApiError (422, naming the field)."""
    try:
        return msgspec.convert(dict(query), query_type, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(_invalid(error)) from None


def read_one(body: Buffer, content_type: str | None) -> Posted:
    """The group in the body of POST /scored_data.

    Raises:
        ApiError: 422 naming the field, 400 for what is no JSON (or MessagePack) at all.
    """
    msgpack = wire.is_msgpack(content_type)
    try:
        try:
            group = _read(body, msgpack)
        except msgspec.DecodeError:
            if not msgpack and (finite := _without_nan(bytes(body))) != body:
                # Python's JSON writes NaN, which JSON has not: say where it stands rather than `malformed`.
                raise _non_finite(finite) from None
            raise
        return Posted(group, encode_checked(group))
    except InvalidGroup as error:
        raise _refusal(error) from None
    except _UNREADABLE as error:
        raise _malformed(error, content_type) from None


def read_list(body: bytes, content_type: str | None) -> list[Posted | ApiError]:
    """The groups in the body of POST /scored_data_list; for a wrong one the refusal that it alone would get.

    Raises:
        ApiError: 400 or 422 where the body is no list.
    """
    read: list[Posted | ApiError] = []
    for raw in _split(body, content_type):
        try:
            read.append(read_one(memoryview(raw), content_type))
        except ApiError as error:
            read.append(error)
    return read


def take_one(service: Service, posted: Posted, key: bytes | None) -> wire.ScoredDataResponse:
    """Queue a group that was read.

    Raises:
        ApiError: its env_id was never given out.
    """
    try:
        return service.take(posted, key)
    except UnknownEnvironment as error:
        raise ApiError(422, error.problems[0], "env_id") from None


def take_list(service: Service, posted: list[Posted | ApiError], key: bytes | None) -> wire.ScoredDataListResponse:
    """Queue the groups that are fit, and name the others."""
    buffered: list[int] = []
    rejected: list[wire.RejectedGroup] = []
    for i, each in enumerate(posted):
        try:
            if isinstance(each, ApiError):
                raise each
            answer = take_one(service, each, key and key + b"/%d" % i)
        except ApiError as error:
            rejected.append(wire.RejectedGroup(group=i, field=error.key or "", detail=str(error)))
        else:
            if answer.buffer_size is not None:
                buffered.append(answer.buffer_size)
    return wire.ScoredDataListResponse(
        status="partial" if rejected else "received",
        groups_processed=len(posted) - len(rejected),
        buffered=len(buffered) or None,
        last_buffer_size=buffered[-1] if buffered else None,
        rejected=rejected or None,
    )


def _split(body: bytes, content_type: str | None) -> list[Raw]:
    try:
        return wire.decode(body, list[Raw], content_type or wire.JSON)
    except msgspec.ValidationError as error:
        raise ApiError(422, Problem("body", wanted="a list of groups", summary=str(error))) from None
    except _UNREADABLE as error:
        try:
            if not wire.is_msgpack(content_type) and (finite := _without_nan(body)) != body:
                # Split with null in the place of NaN; the groups that have it are refused for the null.
                return _split(finite, content_type)
        except InvalidGroup as nan:
            raise _refusal(nan) from None
        raise _malformed(error, content_type) from None


def _refusal(group: InvalidGroup) -> ApiError:
    return ApiError(422, group.problems[0], re.split(r"\W", group.field)[0] or None)


def _malformed(error: Exception, content_type: str | None) -> ApiError:
    kind = "MessagePack" if wire.is_msgpack(content_type) else "JSON"
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return ApiError(400, Problem("body", wanted=kind, summary=reason))


def _invalid(error: msgspec.ValidationError, within: str = "") -> InvalidGroup:
    """A decoder's complaint as ours; the path that it names is that of the place `within` the group."""
    message = str(error)
    if match := _COMPLAINT.fullmatch(message):
        return InvalidGroup(within + match[2], match[1])
    missing = re.search(r"missing required field `(\w+)`", message)
    return InvalidGroup(missing[1] if missing and not within else within, message)


def _without_nan(body: bytes) -> bytes:
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


def _non_finite(finite: bytes) -> InvalidGroup:
    try:
        _read(finite, msgpack=False)
    except InvalidGroup as error:
        return InvalidGroup(error.field, f"NaN or Infinity, expected a finite number ({error.summary})")
    return InvalidGroup("", "NaN or Infinity, which JSON does not have")


# One group


def _read(body: Buffer, msgpack: bool) -> wire.PackedGroup:
    """The group that a body carries, checked and packed.

    Raises:
        InvalidGroup: not fit to be trained on, or not a group at all.
        msgspec.DecodeError: not JSON (or not MessagePack).
    """
    read = msgpack_decode if msgpack else json_decode
    try:
        if not msgpack:
            return _pack(read(body, type=_Lists if len(body) >= LONG_BODY else wire.ScoredData), read)
        try:
            packed = read(body, type=wire.UnreadGroup)
        except msgspec.ValidationError as error:
            try:  # MessagePack with lists, as a generic client sends it
                lists = read(body, type=_Lists)
            except msgspec.ValidationError as plain:
                # Lists where bytes should be: complain about the plain form. Bytes where lists should be: the packed.
                raise (error if "got `bytes`" in str(plain) else plain) from None
            return _pack(lists, read)
        return _checked(packed, {name: getattr(packed, name) for name in packed.__struct_fields__}, read)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None


def _pack(group: wire.ScoredData, read: Any) -> wire.PackedGroup:
    """The group packed and checked; its rows may still be encoded."""
    fields: dict[str, Any] = {name: getattr(group, name) or None for name in wire.UNPACKED_FIELDS}
    lengths: list[int] = []
    for field in (*WHOLE, *PER_TOKEN):
        got: list[int] = []
        rows = _rows(group, field, lengths, got, read)
        packed = pack_ints(rows) if field in WHOLE else pack_floats(rows)
        if field == "tokens":
            lengths = got
        if field == "masks" or any(got):
            check_lengths(field, got, lengths, "one entry per token" if field in WHOLE else "one number per token")
        fields[field] = packed if field in WHOLE or any(got) else None
    return _checked(group, fields | {"lengths": lengths, "scores": group.scores, "env_id": group.env_id}, read)


def _rows(group: wire.ScoredData, field: str, lengths: list[int], got: list[int], read: Any) -> Iterator[list[Any]]:
    """Rows of numbers, decoded as they are asked for; `got` gathers their lengths."""
    row_type = _INTS if field in WHOLE else list[float]
    for i, row in enumerate(getattr(group, field) or ()):
        numbers: list[Any] = _row(row, row_type, field, i, read)
        if field == "advantages" and i < len(lengths):
            numbers = _spread(numbers, lengths[i])
        got.append(len(numbers))
        yield numbers


def _spread(row: list[float], length: int) -> list[float]:
    """Advantages, one per token. Some environments send a row of another length that says one number over and
    over: it is the whole sequence's advantage."""
    return row[:1] * length if row and len(row) != length and len(set(row)) == 1 else row


def _row(row: Any, row_type: Any, field: str, i: int, read: Any) -> Any:
    if not isinstance(row, Raw):
        return row
    try:
        return read(row, type=row_type)
    except msgspec.ValidationError as error:
        raise _invalid(error, within=f"{field}[{i}]") from None


def _checked(unread: wire.ScoredData | wire.PackedGroup, fields: dict[str, Any], read: Any) -> wire.PackedGroup:
    """The packed group of these fields, checked, with the rows of `unread` that are still encoded."""
    for i, conversation in enumerate(unread.messages or ()):
        fields["messages"][i] = _row(conversation, list[dict[str, Any]], "messages", i, read)
    _read_teacher(fields, read)
    group = wire.PackedGroup(**fields)
    check(group)
    return group


def _read_teacher(fields: dict[str, Any], read: Any) -> None:
    """Check what a teacher says, position by position. Rows that came encoded become MessagePack: as lists they may
    take more memory than all the rest."""
    ids, logprobs, lengths = fields["distill_token_ids"], fields["distill_logprobs"], fields["lengths"]
    if not ids and not logprobs:
        return
    check_count("distill_token_ids", len(ids or ()), len(lengths), LIST_PER_TOKEN)
    check_count("distill_logprobs", len(logprobs or ()), len(lengths), LIST_PER_TOKEN)
    for i, length in enumerate(lengths):
        id_row = _row(ids[i], list[_INTS], "distill_token_ids", i, read)
        logprob_row = _row(logprobs[i], list[list[float]], "distill_logprobs", i, read)
        check_teacher_row(i, id_row, logprob_row, length)
        for rows, row in ((ids, id_row), (logprobs, logprob_row)):
            if isinstance(rows[i], Raw):
                rows[i] = Raw(msgspec.msgpack.encode(row))
