"""A posted body becomes groups in the queue; of a list, those that are wrong are named and the others taken.

Reading is pure and runs in any thread. msgspec lets no other thread run while it works: a long body is read in a thread
row by row, so that the event loop waits for one row at most. A list is read and queued a few groups at a time, and
other requests have their turn between two of these parts.
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

MOST_GROUPS = 1 << 16
"""Groups in a list. A group of three bytes takes 100 bytes of memory until it is read, and some 2 µs to refuse."""
NAMED_REFUSALS = 100
"""Groups of a list whose refusal is explained; the others are counted."""
TURN_GROUPS = 128
"""Groups of a list that are read between two turns of other requests, some 4 ms of work if they are small."""

_COMPLAINT = re.compile(r"(.*) - at `\$\.?(.*)`")
# A string without an end reaches to the end: otherwise each quote in it would be tried as a beginning.
_NON_FINITE = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?|-?\b(?:NaN|Infinity)\b', re.DOTALL)
_INTS = list[Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]]
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

_BRACKET = re.compile(rb'["\[\]{}]')
_FLAT = re.compile(rb'(?:[^"\[\]{}]++|\{[^"\[\]{},]*+\}|\[[^"\[\]{},]*+\])++')
"""Within a list: elements without commas in them, however many, and the commas between them."""
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_MSGPACK_LIST = 0xDD
"""First byte of a MessagePack list whose length follows in four bytes; that of a list with another first byte is below
`MOST_GROUPS`."""

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
    try:
        return _posted(body, wire.is_msgpack(content_type))
    except InvalidGroup as error:
        raise _refusal(error) from None
    except msgspec.ValidationError as error:
        raise _refusal(_invalid(error)) from None
    except _UNREADABLE as error:
        raise _malformed(error, content_type) from None


def _posted(body: Buffer, msgpack: bool) -> Posted:
    """Return the group that a body carries. Raises InvalidGroup, or what a decoder raises (`_UNREADABLE`)."""
    try:
        group = _read(body, msgpack)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if not msgpack and (finite := _without_nan(bytes(body))) != body:
            # Python's JSON writes NaN, which JSON has not: say where it stands rather than `malformed`.
            raise _non_finite(finite) from None
        raise
    return Posted(group, encode_checked(group))


def take_one(service: Service, posted: Posted, key: bytes | None) -> wire.ScoredDataResponse:
    """Queue a group that was read.

    Raises:
        ApiError: its env_id was never given out.
    """
    try:
        return service.take(posted, key)
    except UnknownEnvironment as error:
        raise ApiError(422, error.problems[0], "env_id") from None


class GroupCount:
    """Counts the groups of a list while its body arrives: a list of too many is refused before it is held in memory.

    Of a body that is no list, or malformed, the count means nothing; decoding it refuses it.
    """

    def __init__(self, content_type: str | None) -> None:
        self._msgpack = wire.is_msgpack(content_type)
        self._head = b""
        self._depth = self._commas = 0
        self._in_string = self._escaped = False

    def see(self, piece: bytes) -> None:
        """Look at the next piece of the body.

        Raises:
            ApiError: 413, more than `MOST_GROUPS`.
        """
        if not self._msgpack:
            self._see_json(piece)
        elif len(self._head) < 5:
            self._head += piece[: 5 - len(self._head)]
            if len(self._head) == 5 and self._head[0] == _MSGPACK_LIST:
                self._check(int.from_bytes(self._head[1:], "big"))

    def _see_json(self, piece: bytes) -> None:
        at = int(self._escaped)  # the piece before ended within an escape
        self._escaped = False
        while at < len(piece):
            if self._in_string:
                match = _IN_STRING.match(piece, at)
                assert match is not None, "it matches nothing, too"
                at = match.end() + 1
                self._escaped = piece[match.end() : at] == b"\\"
                self._in_string = self._escaped or match.end() == len(piece)
                continue
            if self._depth == 1 and (flat := _FLAT.match(piece, at)):
                at = flat.end()
                self._commas += piece.count(b",", flat.start(), at)
                self._check(self._commas + 1)
            match = _BRACKET.search(piece, at)
            if match is None:
                return
            at = match.end()
            match match[0]:
                case b'"':
                    self._in_string = True
                case b"[" | b"{":
                    self._depth += 1
                case _:
                    self._depth -= 1

    def _check(self, groups: int) -> None:
        if groups > MOST_GROUPS:
            raise ApiError(
                413,
                Problem(
                    "body", f"a list of {groups:,} groups or more", f"at most {MOST_GROUPS:,}", "post several lists"
                ),
            )


class PostedList:
    """The groups of one POST /scored_data_list. They are read and queued turn by turn; call nothing concurrently.

    Args:
        key: names this post, see `Service.take`.

    Raises:
        ApiError: 400 or 422 where the body is no list.
    """

    def __init__(self, body: bytes, content_type: str | None, key: bytes | None) -> None:
        self._groups = _split(body, content_type)
        self._content_type = content_type
        self._key = key
        self._rejected: list[wire.RejectedGroup] = []
        self._refused = 0
        self._buffered: list[int] = []

    def turns(self) -> Iterator[tuple[range, int]]:
        """Yield the places of groups that are read together, and their bytes: `TURN_GROUPS` or `LONG_BODY` at most,
        or one group of more bytes."""
        start = size = 0
        for i, raw in enumerate(self._groups):
            length = memoryview(raw).nbytes
            if i > start and (i - start == TURN_GROUPS or size + length >= LONG_BODY):
                yield range(start, i), size
                start, size = i, 0
            size += length
        if start < len(self._groups):
            yield range(start, len(self._groups)), size

    def read(self, places: range) -> list[Posted | ApiError | None]:
        """Return these groups; for a wrong one the refusal that it alone would get, or None if enough are named."""
        read: list[Posted | ApiError | None] = []
        is_named = len(self._rejected) < NAMED_REFUSALS
        msgpack = wire.is_msgpack(self._content_type)
        for i in places:
            body = memoryview(self._groups[i])
            try:
                read.append(read_one(body, self._content_type) if is_named else _posted(body, msgpack))
            except ApiError as error:
                read.append(error)
            except (InvalidGroup, *_UNREADABLE):
                read.append(None)  # to say why takes ten times as long
        return read

    def take(self, service: Service, places: range, read: list[Posted | ApiError | None]) -> None:
        """Queue the groups that are fit, and note the others."""
        for i, each in zip(places, read, strict=True):
            if not isinstance(each, Posted):
                self._refuse(i, each)
                continue
            try:
                answer = take_one(service, each, self._key and self._key + b"/%d" % i)
            except ApiError as error:
                self._refuse(i, error)
            else:
                if answer.buffer_size is not None:
                    self._buffered.append(answer.buffer_size)

    def _refuse(self, i: int, error: ApiError | None) -> None:
        self._refused += 1
        if error is not None and len(self._rejected) < NAMED_REFUSALS:
            self._rejected.append(wire.RejectedGroup(group=i, field=error.key or "", detail=str(error)))

    def answer(self) -> wire.ScoredDataListResponse:
        """Return what became of the list, once every turn is over."""
        return wire.ScoredDataListResponse(
            status="partial" if self._refused else "received",
            groups_processed=len(self._groups) - self._refused,
            buffered=len(self._buffered) or None,
            last_buffer_size=self._buffered[-1] if self._buffered else None,
            rejected=self._rejected or None,
            more_rejected=self._refused - len(self._rejected) or None,
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
    except (InvalidGroup, msgspec.ValidationError) as caught:
        error = caught if isinstance(caught, InvalidGroup) else _invalid(caught)
        return InvalidGroup(error.field, f"NaN or Infinity, expected a finite number ({error.summary})")
    return InvalidGroup("", "NaN or Infinity, which JSON does not have")


# One group


def _read(body: Buffer, msgpack: bool) -> wire.PackedGroup:
    """The group that a body carries, checked and packed.

    Raises:
        InvalidGroup: not fit to be trained on.
        msgspec.ValidationError: not a group at all; see `_invalid`.
        msgspec.DecodeError: not JSON (or not MessagePack).
    """
    read = msgpack_decode if msgpack else json_decode
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
