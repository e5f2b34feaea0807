"""A posted body becomes groups in the queue; of a list, those that are wrong are named and the others taken.

A long body is read in a thread. A list is read and queued a few groups at a time, and other requests have their turn
between two of these parts.
"""

import re
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Raw

from environments.api import groups, wire
from environments.api.groups import InvalidGroup, Posted
from environments.api.records import ApiError, UnknownEnvironment
from environments.api.service import Service
from grpo_common.errors import Problem

LONG_BODY = 1 << 19
"""Bytes from which a body is read in a thread; a shorter one takes some 3 ms."""
MOST_GROUPS = 1 << 16
"""Groups in a list. A group of three bytes takes 100 bytes of memory until it is read, and some 2 µs to refuse."""
NAMED_REFUSALS = 100
"""Groups of a list whose refusal is explained; the others are counted."""
TURN_GROUPS = 128
"""Groups of a list that are read between two turns of other requests, some 4 ms of work if they are small."""

_COMPLAINT = re.compile(r"(.*) - at `\$\.?(.*)`")
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

_BRACKET = re.compile(rb'["\[\]{}]')
# Counted repeats, as Python before 3.11.5 matches possessive repeats of a group wrongly, and greedy ones take memory.
_FLAT = re.compile(rb'(?:[^"\[\]{}]++|\{[^"\[\]{},]*+\}|\[[^"\[\]{},]*+\]){1,999}')
"""Within a list: elements without commas in them, many at once, and the commas between them."""
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.){1,999}', re.DOTALL)
_MSGPACK_LIST = 0xDD
"""First byte of a MessagePack list whose length follows in four bytes; that of a list with another first byte is below
`MOST_GROUPS`."""

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
    for name, value in query.items():
        if value.lower() == "null":  # the decoder would read it as an absent field: a lease that nobody asked for
            raise ApiError(422, Problem(name, value, "a value", "leave the field out"), name)
    try:
        return msgspec.convert(dict(query), query_type, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(_invalid(error)) from None


def read_one(body: bytes | memoryview, content_type: str | None) -> Posted:
    """The group in the body of POST /scored_data.

    Raises:
        ApiError: 422 naming the field, 400 for what is no JSON (or MessagePack) at all.
    """
    try:
        return groups.read(body, wire.is_msgpack(content_type))
    except InvalidGroup as error:
        raise _refusal(error) from None
    except msgspec.ValidationError as error:
        raise _refusal(_invalid(error)) from None
    except _UNREADABLE as error:
        raise _malformed(error, content_type) from None


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
                if inner := _IN_STRING.match(piece, at):
                    at = inner.end()
                else:  # a quote, or a backslash that ends the piece
                    self._in_string = self._escaped = piece[at : at + 1] == b"\\"
                    at += 1
                continue
            if self._depth == 1 and (flat := _FLAT.match(piece, at)):
                at = flat.end()
                self._commas += piece.count(b",", flat.start(), at)
                self._check(self._commas + 1)
                continue
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
        self._groups, self._content_type = _split(body, content_type)
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
                read.append(read_one(body, self._content_type) if is_named else groups.read(body, msgpack))
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


def _split(body: bytes, content_type: str | None) -> tuple[list[Raw], str | None]:
    """Return a list's groups and their content type, which is MessagePack for JSON with NaN."""
    try:
        return wire.decode(body, list[Raw], content_type or wire.JSON), content_type
    except msgspec.ValidationError as error:
        raise ApiError(422, Problem("body", wanted="a list of groups", summary=str(error))) from None
    except _UNREADABLE as error:
        try:
            packed = None if wire.is_msgpack(content_type) else groups.with_nan(body)
        except InvalidGroup as nan:
            raise _refusal(nan) from None
        if packed is None:
            raise _malformed(error, content_type) from None
    return _split(packed, wire.MSGPACK)


def _refusal(group: InvalidGroup) -> ApiError:
    return ApiError(422, group.problems[0], re.split(r"\W", group.field)[0] or None)


def _malformed(error: Exception, content_type: str | None) -> ApiError:
    kind = "MessagePack" if wire.is_msgpack(content_type) else "JSON"
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return ApiError(400, Problem("body", wanted=kind, summary=reason))


def _invalid(error: msgspec.ValidationError) -> InvalidGroup:
    """Return a decoder's complaint as ours, with the path that it names."""
    message = str(error)
    if match := _COMPLAINT.fullmatch(message):
        return InvalidGroup(match[2], match[1])
    missing = re.search(r"missing required field `(\w+)`", message)
    return InvalidGroup(missing[1] if missing else "", message)
