"""Is a group fit to be trained on? One that is not is refused at the door, with the field and the place named."""

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from msgspec import Struct

from environments.api import wire
from environments.api.packing import numbers_of
from grpo_common.errors import UserError
from grpo_common.sampling import LEAST_TEMPERATURE

CHUNK = 1 << 16
"""Numbers that are checked in one go, about half a millisecond: no other thread runs meanwhile."""
FLOAT32_MAX = 3.4028234663852886e38
"""The trainer computes in float32: a number beyond this is infinite there."""
WHOLE = ("tokens", "masks")
PER_TOKEN = ("advantages", "ref_logprobs", "inference_logprobs")
LIST_PER_TOKEN = "one list per token"
_SWITCHES = ("sft", "set_advantage_to_zero", wire.TRUNCATED, wire.UNSCORED)


class Posted(Struct, frozen=True):
    """A group that was read and checked, and the bytes that are kept of it."""

    group: wire.PackedGroup
    payload: bytes


class InvalidGroup(UserError, ValueError):
    """A group that cannot be trained on; `field` is the place at fault, `tokens[1][2]` (empty: none can be named)."""

    def __init__(self, field: str, summary: str) -> None:
        super().__init__(summary, field=field)


def check(group: wire.PackedGroup) -> None:
    """Check a packed group, except what a teacher says (`check_teacher_row`).

    Raises:
        InvalidGroup: naming the field, what came and what was wanted.
    """
    _check_numbers(group)
    _check_sequences(group, len(group.lengths))
    _check_messages(group.messages or ())


def encode_checked(group: wire.PackedGroup) -> bytes:
    """The group as MessagePack, which is narrower than JSON in the fields that may hold anything.

    Raises:
        InvalidGroup: a whole number beyond 64 bits, or nesting without end.
    """
    try:
        # msgspec allocates a buffer half as long again and shrinks it in place. The freed tails are too short to be
        # used again, so memory would grow by another half. A copy takes only its own bytes.
        return bytes(memoryview(wire.encode(group, wire.MSGPACK)))
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidGroup("", f"a field of this group cannot be kept: {error}") from None


def _check_numbers(group: wire.PackedGroup) -> None:
    """As many numbers as tokens, all of them token ids or finite."""
    lengths, total = group.lengths, sum(group.lengths)
    if not lengths:
        raise InvalidGroup("tokens", "an empty group, expected at least one sequence")
    if 0 in lengths:
        raise InvalidGroup(f"tokens[{lengths.index(0)}]", "an empty sequence, expected at least one token")
    for field in WHOLE:
        if (came := len(getattr(group, field))) != 4 * total:
            raise InvalidGroup(field, f"{came} bytes, expected {4 * total} (int32 of {total} tokens)")
    _check_token_ids(group.tokens, lengths)
    for field in PER_TOKEN:
        data: bytes | None = getattr(group, field)
        if data is not None and len(data) not in (4 * total, 8 * total):
            raise InvalidGroup(field, f"{len(data)} bytes, expected {4 * total} (float32) or {8 * total} (float64)")
        for start in range(0, total if data else 0, CHUNK):
            numbers = numbers_of(data or b"", slice(start, min(start + CHUNK, total)), total, "f")
            if (bad := _first_unfit(numbers)) is not None:
                raise InvalidGroup(f"{field}{_place(start + bad, lengths)}", _unfit_number(numbers[bad]))


def _check_token_ids(tokens: bytes, lengths: list[int]) -> None:
    """No id is below 0; the vocabulary's end only the trainer knows."""
    if tokens[3::4].isascii():  # of each int32 the highest byte: its first bit is the sign
        return
    total = len(tokens) // 4
    numbers = numbers_of(tokens, slice(0, total), total, "i")
    bad = next(i for i, number in enumerate(numbers) if number < 0)
    raise InvalidGroup(
        f"tokens{_place(bad, lengths)}",
        f"{numbers[bad]}, expected a token id of the model, 0 or more; mark what is not trained in `masks`",
    )


def check_teacher_row(i: int, ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], length: int) -> None:
    """Check what a teacher says of a sequence of `length` tokens, position by position. Raises InvalidGroup."""
    _check_length("distill_token_ids", i, len(ids), length, LIST_PER_TOKEN)
    _check_length("distill_logprobs", i, len(logprobs), length, LIST_PER_TOKEN)
    for j, (some_ids, some_logprobs) in enumerate(zip(ids, logprobs, strict=True)):
        place = f"distill_logprobs[{i}][{j}]"
        if len(some_ids) != len(some_logprobs):
            raise InvalidGroup(place, f"{len(some_logprobs)} numbers for {len(some_ids)} token ids")
        if (bad := _first_unfit(some_logprobs)) is not None:
            raise InvalidGroup(f"{place}[{bad}]", _unfit_number(some_logprobs[bad]))


def _check_sequences(group: wire.PackedGroup, count: int) -> None:
    """One of each per sequence, and options that the trainer can go by."""
    for field in ("scores", "overrides", "policy_versions", "routed_experts"):
        if ((given := getattr(group, field)) or field == "scores") and len(given) != count:
            raise InvalidGroup(field, f"{len(given)} for {count} sequences, expected one each")
    if (bad := _first_unfit(group.scores)) is not None:
        raise InvalidGroup(f"scores[{bad}]", _unfit_number(group.scores[bad]))
    for field in ("generation_params", "group_overrides"):
        _check_options(field, getattr(group, field) or {})
    for i, own in enumerate(group.overrides or ()):
        _check_options(f"overrides[{i}]", own)


def _check_options(place: str, options: Mapping[str, Any]) -> None:
    """Of fields that may hold anything, what the trainer goes by."""
    temperature = options.get("temperature")
    if temperature is not None and not _is_temperature(temperature):
        raise InvalidGroup(
            f"{place}.temperature",
            f"{_shown(temperature)}, expected that of sampling, a finite number above 0 "
            f"({LEAST_TEMPERATURE:g} at least); leave it out for 1",
        )
    for name in _SWITCHES if place != "generation_params" else ():
        if (value := options.get(name)) is not None and not isinstance(value, bool) and value not in (0, 1):
            raise InvalidGroup(f"{place}.{name}", f"{_shown(value)}, expected true or false")


def _is_temperature(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return LEAST_TEMPERATURE <= value <= FLOAT32_MAX


def _check_messages(conversations: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    for i, conversation in enumerate(conversations):
        for j, message in enumerate(conversation):
            for key in ("role", "content"):
                if key not in message:
                    raise InvalidGroup(f"messages[{i}][{j}]", f"no `{key}`, expected role and content")


def check_lengths(field: str, got: list[int], wanted: list[int], rule: str) -> None:
    """Check that a field's rows are as long as those of `tokens`. Raises InvalidGroup."""
    if got != wanted:
        check_count(field, len(got), len(wanted), rule)
        for i, pair in enumerate(zip(got, wanted, strict=True)):
            _check_length(field, i, *pair, rule)


def check_count(field: str, got: int, wanted: int, rule: str) -> None:
    """Check that a field has a row for each sequence. Raises InvalidGroup."""
    if got != wanted:
        raise InvalidGroup(field, f"{got} sequences, tokens has {wanted}; expected {rule}")


def _check_length(field: str, i: int, got: int, wanted: int, rule: str) -> None:
    if got != wanted:
        raise InvalidGroup(f"{field}[{i}]", f"{got} entries, tokens[{i}] has {wanted}; expected {rule}")


def _first_unfit(numbers: "Sequence[float] | array[float]") -> int | None:
    """Where the first number stands that is not finite in float32."""
    # Not a number and infinity survive a sum, and one of finite float32 numbers is finite: a quick pass clears a row.
    single = numbers if isinstance(numbers, array) and numbers.typecode == "f" else array("f", numbers)
    if math.isfinite(sum(single)):
        return None
    return next(i for i, number in enumerate(single) if not math.isfinite(number))


def _unfit_number(number: float) -> str:
    return f"{number}, expected a finite number" + (" (in float32)" if math.isfinite(number) else "")


def _place(flat: int, lengths: list[int]) -> str:
    """`[sequence][token]` of the number that stands there when all sequences lie one after another."""
    starts = [0, *accumulate(lengths)]
    row = bisect_right(starts, flat) - 1
    return f"[{row}][{flat - starts[row]}]"


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "…"
