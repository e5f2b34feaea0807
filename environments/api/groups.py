"""Posted bodies become groups: read, checked and packed in one place. What can't be trained on is refused by its place.

Reading is pure and runs in any thread. msgspec lets no other thread run while it decodes one group, so lists are
read group by group.
"""

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import accumulate, chain
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct
from numpy.typing import NDArray

from environments.api import wire
from environments.api.errors import ApiError
from grpo_common.errors import Problem
from grpo_common.sampling import LEAST_TEMPERATURE

LONG_BODY = 1 << 19
"""Bytes from which a body is read in a thread; a shorter one takes some 3 ms."""
LONGEST_EXPLAINED = 4 << 20
"""Bytes of JSON in which the place of NaN is named; longer ones are malformed, and msgspec names the byte."""
MOST_LISTS = 16 << 20
"""Bytes of MessagePack that may have lists instead of packed numbers. Their objects take up to 30 bytes for each."""
MOST_GROUPS = 1 << 16
"""Groups in a list. A group of three bytes takes 100 bytes of memory until it is read, and some 2 µs to refuse."""
SPARE_DEPTH = 200
"""Levels by which a value may be nested deeper without an error. Python counts its own calls among them, and those who
read a group later, a trainer among them, have more calls around them than the thread that reads it here."""
NAMED_REFUSALS = 100
"""Groups of a list whose refusal is explained; the others are counted. To explain one takes ten times as long."""

_FLOAT32_MAX = 3.4028234663852886e38
_FLOATS = ("advantages", "ref_logprobs", "inference_logprobs")
_PER_SEQUENCE = ("overrides", "policy_versions", "routed_experts")
_SWITCHES = ("sft", "set_advantage_to_zero", wire.TRUNCATED, wire.UNSCORED)
_INT32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

Buffer = bytes | memoryview


class UnreadGroup(wire.PackedGroup, frozen=True, kw_only=True, omit_defaults=True):
    """A packed group whose longest fields keep their rows encoded: decoded, they may take more than all the rest."""

    messages: list[Raw] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    distill_token_ids: list[Raw] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    distill_logprobs: list[Raw] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


ENCODED_ROWS: dict[str, Callable[[Raw], Any]] = {
    "messages": msgspec.msgpack.Decoder(list[dict[str, Any]]).decode,
    "distill_token_ids": msgspec.msgpack.Decoder(list[list[_INT32]]).decode,
    "distill_logprobs": msgspec.msgpack.Decoder(list[list[float]]).decode,
}
_from_json = msgspec.json.Decoder(wire.ScoredData).decode
_from_lists = msgspec.msgpack.Decoder(wire.ScoredData).decode
_from_packed = msgspec.msgpack.Decoder(UnreadGroup).decode


class Posted(Struct, frozen=True):
    """A group that was read and checked, and the bytes that are kept of it."""

    group: wire.PackedGroup
    payload: bytes


class InvalidGroup(Exception):
    """A group that can't be trained on; `place` is at fault, `tokens[1][2]` (empty: none can be named)."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(place, reason)
        self.place, self.reason = place, reason


REFUSED = (InvalidGroup, msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What reading a body may raise; `refusal` is the answer to it."""


def refusal(error: Exception, content_type: str | None) -> ApiError:
    """Return the answer to a body that can't be read: 422 with the field, 400 if it is no JSON (or MessagePack)."""
    if isinstance(error, msgspec.ValidationError):
        found = re.fullmatch(r"(.*) - at `\$\.?(.*)`", str(error))
        missing = re.search(r"missing required field `(\w+)`", str(error))
        error = InvalidGroup(found[2], found[1]) if found else InvalidGroup(missing[1] if missing else "", str(error))
    if isinstance(error, InvalidGroup):
        key = re.split(r"\W", error.place)[0] or None
        return ApiError(422, Problem(error.place, summary=error.reason), key)
    kind = "MessagePack" if wire.is_msgpack(content_type) else "JSON"
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return ApiError(400, Problem("body", wanted=kind, summary=reason))


def read(body: Buffer, content_type: str | None) -> Posted:
    """Return the group that a body carries. Raises one of `REFUSED`."""
    try:
        group = _of_msgpack(body) if wire.is_msgpack(content_type) else _packed(_from_json(body))
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if wire.is_msgpack(content_type) or (packed := _with_nan(body)) is None:
            raise
        _of_msgpack(packed)  # names the place, if it is one of numbers
        raise InvalidGroup("", "NaN or Infinity, which JSON does not have") from None
    try:
        # msgspec allocates a buffer half as long again and shrinks it in place. The freed tails are too short to be
        # used again, so memory would grow by another half. A copy takes only its own bytes.
        return Posted(group, bytes(memoryview(wire.encode(group, wire.MSGPACK))))
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        # JSON is wider than MessagePack in the fields that may hold anything.
        raise InvalidGroup("", f"a field of this group can't be kept: {error}") from None


def _with_nan(body: Buffer) -> bytes | None:
    """Return JSON that is malformed only by NaN or Infinity as MessagePack, which has them; None: it is malformed.

    Python's own encoder writes such JSON.
    """
    text = bytes(body)
    if len(text) > LONGEST_EXPLAINED or not (b"NaN" in text or b"Infinity" in text):
        return None
    try:
        return msgspec.msgpack.encode(json.loads(text))
    except (ValueError, OverflowError, RecursionError):
        return None


def _of_msgpack(body: Buffer) -> wire.PackedGroup:
    try:
        return _checked(_from_packed(body))
    except msgspec.ValidationError as error:
        if len(body) > MOST_LISTS:
            most = f"got `array`, which may be in bodies of up to {MOST_LISTS >> 20} MiB"
            raise msgspec.ValidationError(str(error).replace("got `array`", most)) from None
        try:  # a generic client sends lists
            lists = _from_lists(body)
        except msgspec.ValidationError as plain:
            # Lists where bytes should be: complain about the plain form. Bytes where lists should be: the packed.
            raise (error if "got `bytes`" in str(plain) else plain) from None
    return _packed(lists)


def _packed(group: wire.ScoredData) -> wire.PackedGroup:
    """Return the group packed and checked."""
    lengths = [len(row) for row in group.tokens]
    if group.advantages and len(group.advantages) == len(lengths):
        # An advantage row of another length that repeats one number is that number for the whole sequence.
        rows = [
            row[:1] * length if row and len(row) != length and len(set(row)) == 1 else row
            for row, length in zip(group.advantages, lengths, strict=True)
        ]
        group = msgspec.structs.replace(group, advantages=rows)
    for field in ("masks", *_FLOATS):
        rows = getattr(group, field) or ()
        if field == "masks" or any(rows):
            rule = f"one {'entry' if field == 'masks' else 'number'} per token"
            _check_length(field, "", len(rows), len(lengths), rule)
            for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                _check_length(field, f"[{i}]", len(row), length, rule)
    return _checked(wire.pack(group))


def _checked(group: wire.PackedGroup) -> wire.PackedGroup:
    """Return the group, if it has as many numbers as tokens, all of them fit, and options that a trainer can use."""
    lengths, total = group.lengths, sum(group.lengths)
    if not lengths:
        raise InvalidGroup("tokens", "an empty group, expected at least one sequence")
    if 0 in lengths:
        raise InvalidGroup(f"tokens[{lengths.index(0)}]", "an empty sequence, expected at least one token")
    for field in ("tokens", "masks"):
        if (came := len(getattr(group, field))) != 4 * total:
            raise InvalidGroup(field, f"{came} bytes, expected {4 * total} (int32 of {total} tokens)")
    tokens = np.frombuffer(group.tokens, "<i4")
    if tokens.min() < 0:
        bad = int(np.argmax(tokens < 0))
        wanted = "a token id of the model, 0 or more; mark what is not trained in `masks`"
        raise InvalidGroup(f"tokens{_place(bad, lengths)}", f"{tokens[bad]}, expected {wanted}")
    for field in _FLOATS:
        if (data := getattr(group, field)) is None:
            continue
        if len(data) not in (4 * total, 8 * total):
            raise InvalidGroup(field, f"{len(data)} bytes, expected {4 * total} (float32) or {8 * total} (float64)")
        _check_finite(field, np.frombuffer(data, "<f4" if len(data) == 4 * total else "<f8"), lengths)
    for field in ("scores", *_PER_SEQUENCE):
        if ((given := getattr(group, field)) or field == "scores") and len(given) != len(lengths):
            raise InvalidGroup(field, f"{len(given)} for {len(lengths)} sequences, expected one each")
    _check_finite("scores", np.array(group.scores), None)
    for field in ("generation_params", "overrides", "group_overrides", "images"):
        _check_json(field, getattr(group, field))
    _check_options("generation_params", group.generation_params or {})
    _check_options("group_overrides", group.group_overrides or {})
    for i, (own, length) in enumerate(zip(group.overrides or [{}] * len(lengths), lengths, strict=True)):
        _check_options(f"overrides[{i}]", own)
        try:
            wire.branch_lengths({**(group.group_overrides or {}), **own}, length)
        except ValueError as error:
            place = f"overrides[{i}]" if wire.BRANCHES in own else "group_overrides"
            raise InvalidGroup(f"{place}.{wire.BRANCHES}", str(error)) from None
    for i, conversation in enumerate(group.messages or ()):
        messages = _row("messages", i, conversation)
        for j, message in enumerate(messages):
            for key in ("role", "content"):
                if key not in message:
                    raise InvalidGroup(f"messages[{i}][{j}]", f"no `{key}`, expected role and content")
        _check_json(f"messages[{i}]", [each for one in messages for each in one.values() if type(each) is not str])
    if group.distill_token_ids or group.distill_logprobs:
        _check_teacher(group.distill_token_ids or (), group.distill_logprobs or (), lengths)
    return group


def _check_finite(field: str, numbers: NDArray[np.floating], lengths: list[int] | None) -> None:
    """Check that numbers are finite in float32, in which the trainer computes; `lengths` None: they are one row."""
    with np.errstate(over="ignore"):
        finite = np.isfinite(numbers.astype(np.float32, copy=False))
    if not finite.all():
        bad = int(np.argmin(finite))
        number = float(numbers[bad])
        wanted = "a finite number" + (" (in float32)" if math.isfinite(number) else "")
        place = f"[{bad}]" if lengths is None else _place(bad, lengths)
        raise InvalidGroup(f"{field}{place}", f"{number}, expected {wanted}")


def _check_json(place: str, value: Any) -> None:
    """Check that every answer can hold what a field that may hold anything holds: MessagePack is wider than JSON."""
    if not value:
        return
    try:
        text = msgspec.json.encode(value)
        if text.count(b"[") + text.count(b"{") > SPARE_DEPTH:  # else it can't be nested so deeply
            msgspec.json.encode(reduce(lambda inner, _: [inner], range(SPARE_DEPTH), value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidGroup(place, f"{reason}; expected a value that JSON can hold") from None


def _check_options(place: str, options: Mapping[str, Any]) -> None:
    """Check what the trainer uses of fields that may hold anything."""
    heat = options.get("temperature")
    is_number = isinstance(heat, int | float) and not isinstance(heat, bool)
    if heat is not None and not (is_number and LEAST_TEMPERATURE <= heat <= _FLOAT32_MAX):
        wanted = f"that of sampling, a finite number above 0 ({LEAST_TEMPERATURE:g} at least); leave it out for 1"
        raise InvalidGroup(f"{place}.temperature", f"{heat!r:.80}, expected {wanted}")
    for name in _SWITCHES if place != "generation_params" else ():
        if (value := options.get(name)) is not None and not isinstance(value, bool) and value not in (0, 1):
            raise InvalidGroup(f"{place}.{name}", f"{value!r:.80}, expected true or false")


def _check_teacher(ids: Sequence[Any], logprobs: Sequence[Any], lengths: list[int]) -> None:
    """Check a teacher's tokens: a list for each token of each sequence, and a logprob for each of them."""
    rule = "one list per token"
    _check_length("distill_token_ids", "", len(ids), len(lengths), rule)
    _check_length("distill_logprobs", "", len(logprobs), len(lengths), rule)
    for i, length in enumerate(lengths):
        own_ids, row = _row("distill_token_ids", i, ids[i]), _row("distill_logprobs", i, logprobs[i])
        _check_length("distill_token_ids", f"[{i}]", len(own_ids), length, rule)
        _check_length("distill_logprobs", f"[{i}]", len(row), length, rule)
        counts = [len(numbers) for numbers in row]
        for j, (some_ids, count) in enumerate(zip(own_ids, counts, strict=True)):
            if len(some_ids) != count:
                raise InvalidGroup(f"distill_logprobs[{i}][{j}]", f"{count} numbers for {len(some_ids)} token ids")
        _check_finite(f"distill_logprobs[{i}]", np.fromiter(chain.from_iterable(row), np.float64, sum(counts)), counts)


def _check_length(field: str, at: str, got: int, wanted: int, rule: str) -> None:
    if got != wanted:
        what = "entries" if at else "sequences"
        raise InvalidGroup(field + at, f"{got} {what}, tokens{at} has {wanted}; expected {rule}")


def _row(field: str, i: int, row: Any) -> Any:
    """Return row `i` of a field, decoded if it is still encoded. Raises msgspec.ValidationError with its path."""
    if not isinstance(row, Raw):
        return row
    try:
        return ENCODED_ROWS[field](row)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        raise msgspec.ValidationError(f"{reason} - at `$.{field}[{i}]{path or '`'}") from None


def _place(flat: int, lengths: list[int]) -> str:
    """Return `[row][number]` of the number that stands there when all rows lie one after another."""
    starts = [0, *accumulate(lengths)]
    row = bisect_right(starts, flat) - 1
    return f"[{row}][{flat - starts[row]}]"


# Lists of groups

_IN_STRING = re.compile(rb'["\\]')
_IN_LIST = re.compile(rb'["\[\]{},]')
_IN_GROUP = re.compile(rb'["\[\]{}]')


def split(body: bytes, content_type: str | None) -> tuple[list[Raw], str | None]:
    """Return a list's groups, unread, and their content type, which is MessagePack for JSON with NaN.

    Raise one of `REFUSED`, or ApiError (413) for more than `MOST_GROUPS`: they are counted before they take memory.
    """
    if not wire.is_msgpack(content_type):
        count = _count_json(body)
    else:
        count = int.from_bytes(body[1:5], "big") if body[:1] == b"\xdd" else 0  # lists of another kind are short
    if count > MOST_GROUPS:
        got = f"a list of {count:,} groups or more"
        raise ApiError(413, Problem("body", got, f"at most {MOST_GROUPS:,}", "post several lists"))
    try:
        return wire.decode(body, list[Raw], content_type or wire.JSON), content_type
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        packed = None if wire.is_msgpack(content_type) else _with_nan(body)
        if packed is None:
            raise
    return split(packed, wire.MSGPACK)


def _count_json(body: bytes) -> int:
    """Return how many groups a list has, or one more than `MOST_GROUPS`; anything if it is malformed, or no list."""
    depth = commas = at = 0
    in_string = False
    while commas < MOST_GROUPS:
        pattern = _IN_STRING if in_string else _IN_LIST if depth == 1 else _IN_GROUP
        match = pattern.search(body, at)
        if match is None:
            break
        at = match.end()
        match match[0]:
            case b"\\":
                at += 1
            case b'"':
                in_string = not in_string
            case b",":
                commas += 1
            case b"[" | b"{":
                depth += 1
            case _:
                depth -= 1
    return commas + 1
