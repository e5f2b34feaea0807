"""A posted group is read, checked and packed here. One that can't be trained on is refused, with its field and place.

Reading is pure and runs in any thread. msgspec lets no other thread run while it decodes.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct
from numpy.typing import NDArray

from environments.api import wire
from grpo_common.errors import UserError
from grpo_common.sampling import LEAST_TEMPERATURE

FLOAT32_MAX = 3.4028234663852886e38
"""The trainer computes in float32: a number beyond this is infinite there."""
LONGEST_EXPLAINED = 4 << 20
"""Bytes of JSON in which the place of NaN is named; of longer ones its byte is."""
MOST_LISTS = 16 << 20
"""Bytes of MessagePack that may have lists instead of packed numbers. Their objects take up to 30 bytes for each."""

_PER_TOKEN = ("advantages", "ref_logprobs", "inference_logprobs")
_PER_SEQUENCE = ("scores", "overrides", "policy_versions", "routed_experts")
_SWITCHES = ("sft", "set_advantage_to_zero", wire.TRUNCATED, wire.UNSCORED)
_LIST_PER_TOKEN = "one list per token"

_from_json = msgspec.json.Decoder(wire.ScoredData).decode
_from_lists = msgspec.msgpack.Decoder(wire.ScoredData).decode
_from_packed = msgspec.msgpack.Decoder(wire.UnreadGroup).decode
_INT32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_ROWS: dict[str, Callable[[Raw], Any]] = {
    "messages": msgspec.msgpack.Decoder(list[dict[str, Any]]).decode,
    "distill_token_ids": msgspec.msgpack.Decoder(list[list[_INT32]]).decode,
    "distill_logprobs": msgspec.msgpack.Decoder(list[list[float]]).decode,
}
"""Decode rows of the fields that stay encoded in a packed group, as they may take more memory than all the rest."""

Buffer = bytes | memoryview


class Posted(Struct, frozen=True):
    """A group that was read and checked, and the bytes that are kept of it."""

    group: wire.PackedGroup
    payload: bytes


class InvalidGroup(UserError, ValueError):
    """A group that can't be trained on; `field` is the place at fault, `tokens[1][2]` (empty: none can be named)."""

    def __init__(self, field: str, summary: str) -> None:
        super().__init__(summary, field=field)


def read(body: Buffer, msgpack: bool) -> Posted:
    """Return the group that a body carries.

    Raises:
        InvalidGroup: it can't be trained on.
        msgspec.ValidationError: it is no group; the message has the path.
        msgspec.DecodeError, RecursionError, UnicodeDecodeError: it is no JSON (or no MessagePack).
    """
    try:
        group = _of_msgpack(body) if msgpack else _packed(_from_json(body))
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if not msgpack and (packed := with_nan(body)) is not None:
            _of_msgpack(packed)  # names the place, if it is one of numbers
            raise InvalidGroup("", "NaN or Infinity, which JSON does not have") from None
        raise
    try:
        # msgspec allocates a buffer half as long again and shrinks it in place. The freed tails are too short to be
        # used again, so memory would grow by another half. A copy takes only its own bytes.
        return Posted(group, bytes(memoryview(wire.encode(group, wire.MSGPACK))))
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        # JSON is wider than MessagePack in the fields that may hold anything.
        raise InvalidGroup("", f"a field of this group can't be kept: {error}") from None


def with_nan(body: Buffer) -> bytes | None:
    """Return JSON that is malformed only by NaN or Infinity as MessagePack, which has them; None: it is malformed.

    Python's own encoder writes such JSON.

    Raises:
        InvalidGroup: it is too long to be read again; the first byte is named.
    """
    text = bytes(body)
    first = min((at for name in (b"NaN", b"Infinity") if (at := text.find(name)) >= 0), default=-1)
    if first < 0:
        return None
    if len(text) > LONGEST_EXPLAINED:
        raise InvalidGroup("", f"NaN or Infinity (byte {first}), which JSON does not have")
    try:
        return msgspec.msgpack.encode(json.loads(text.decode()))
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
    for field in ("masks", *_PER_TOKEN):
        rows = getattr(group, field) or ()
        if field == "masks" or any(rows):
            kind = "entry" if field == "masks" else "number"
            _check_rows(field, [len(row) for row in rows], lengths, f"one {kind} per token")
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
        raise InvalidGroup(
            f"tokens{_place(bad, lengths)}",
            f"{tokens[bad]}, expected a token id of the model, 0 or more; mark what is not trained in `masks`",
        )
    for field in _PER_TOKEN:
        if (data := getattr(group, field)) is None:
            continue
        if len(data) not in (4 * total, 8 * total):
            raise InvalidGroup(field, f"{len(data)} bytes, expected {4 * total} (float32) or {8 * total} (float64)")
        _check_finite(field, np.frombuffer(data, "<f4" if len(data) == 4 * total else "<f8"), lengths)
    for field in _PER_SEQUENCE:
        if ((given := getattr(group, field)) or field == "scores") and len(given) != len(lengths):
            raise InvalidGroup(field, f"{len(given)} for {len(lengths)} sequences, expected one each")
    _check_finite("scores", np.array(group.scores), None)
    _check_options("generation_params", group.generation_params or {})
    _check_options("group_overrides", group.group_overrides or {})
    for i, own in enumerate(group.overrides or ()):
        _check_options(f"overrides[{i}]", own)
    for i, conversation in enumerate(group.messages or ()):
        for j, message in enumerate(_row("messages", i, conversation)):
            for key in ("role", "content"):
                if key not in message:
                    raise InvalidGroup(f"messages[{i}][{j}]", f"no `{key}`, expected role and content")
    _check_teacher(group.distill_token_ids or (), group.distill_logprobs or (), lengths)
    return group


def _check_finite(field: str, numbers: NDArray[np.floating], lengths: list[int] | None) -> None:
    """Check that numbers are finite in float32.

    Args:
        lengths: of the rows that lie one after another; None: the numbers are one row.
    """
    with np.errstate(over="ignore"):
        finite = np.isfinite(numbers.astype(np.float32, copy=False))
    if not finite.all():
        bad = int(np.argmin(finite))
        number = float(numbers[bad])
        wanted = "a finite number" + (" (in float32)" if math.isfinite(number) else "")
        place = f"[{bad}]" if lengths is None else _place(bad, lengths)
        raise InvalidGroup(f"{field}{place}", f"{number}, expected {wanted}")


def _check_options(place: str, options: Mapping[str, Any]) -> None:
    """Check what the trainer uses of fields that may hold anything."""
    temperature = options.get("temperature")
    if temperature is not None and not (
        isinstance(temperature, int | float)
        and not isinstance(temperature, bool)
        and LEAST_TEMPERATURE <= temperature <= FLOAT32_MAX
    ):
        raise InvalidGroup(
            f"{place}.temperature",
            f"{_shown(temperature)}, expected that of sampling, a finite number above 0 "
            f"({LEAST_TEMPERATURE:g} at least); leave it out for 1",
        )
    for name in _SWITCHES if place != "generation_params" else ():
        if (value := options.get(name)) is not None and not isinstance(value, bool) and value not in (0, 1):
            raise InvalidGroup(f"{place}.{name}", f"{_shown(value)}, expected true or false")


def _check_teacher(ids: Sequence[Any], logprobs: Sequence[Any], lengths: list[int]) -> None:
    """Check a teacher's tokens: a list for each token of each sequence, and a logprob for each of them."""
    if not ids and not logprobs:
        return
    _check_count("distill_token_ids", len(ids), len(lengths), _LIST_PER_TOKEN)
    _check_count("distill_logprobs", len(logprobs), len(lengths), _LIST_PER_TOKEN)
    for i, length in enumerate(lengths):
        id_row, row = _row("distill_token_ids", i, ids[i]), _row("distill_logprobs", i, logprobs[i])
        _check_length("distill_token_ids", i, len(id_row), length, _LIST_PER_TOKEN)
        _check_length("distill_logprobs", i, len(row), length, _LIST_PER_TOKEN)
        counts = [len(numbers) for numbers in row]
        for j, (some_ids, count) in enumerate(zip(id_row, counts, strict=True)):
            if len(some_ids) != count:
                raise InvalidGroup(f"distill_logprobs[{i}][{j}]", f"{count} numbers for {len(some_ids)} token ids")
        _check_finite(f"distill_logprobs[{i}]", np.fromiter(chain.from_iterable(row), np.float64, sum(counts)), counts)


def _check_rows(field: str, got: list[int], wanted: list[int], rule: str) -> None:
    """Check that a field has a row for each sequence, as long as that of `tokens`."""
    _check_count(field, len(got), len(wanted), rule)
    for i, pair in enumerate(zip(got, wanted, strict=True)):
        _check_length(field, i, *pair, rule)


def _check_count(field: str, got: int, wanted: int, rule: str) -> None:
    if got != wanted:
        raise InvalidGroup(field, f"{got} sequences, tokens has {wanted}; expected {rule}")


def _check_length(field: str, i: int, got: int, wanted: int, rule: str) -> None:
    if got != wanted:
        raise InvalidGroup(f"{field}[{i}]", f"{got} entries, tokens[{i}] has {wanted}; expected {rule}")


def _row(field: str, i: int, row: Any) -> Any:
    """Return row `i` of a field, decoded if it is still encoded. Raises msgspec.ValidationError with its path."""
    if not isinstance(row, Raw):
        return row
    try:
        return _ROWS[field](row)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        raise msgspec.ValidationError(f"{reason} - at `$.{field}[{i}]{path or '`'}") from None


def _place(flat: int, lengths: list[int]) -> str:
    """Return `[row][number]` of the number that stands there when all rows lie one after another."""
    starts = [0, *accumulate(lengths)]
    row = bisect_right(starts, flat) - 1
    return f"[{row}][{flat - starts[row]}]"


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "…"
