"""Is a group fit to be trained on? What is not is refused at the door, with the field and the place named.

Checks of long groups are generators that pause every `CHUNK` numbers, so that others may have their turn.
"""

import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from environments.api import wire
from environments.api.packing import numbers_of
from grpo_common.errors import UserError

CHUNK = 1 << 16
"""Numbers that are looked at in one go: about half a millisecond."""
FLOAT32_MAX = 3.4028234663852886e38
"""The trainer computes in float32: what is beyond this is infinite there."""
LEAST_TEMPERATURE = 1e-5
"""Below it servers sample nothing (vLLM's `_SAMPLING_EPS`), and logits divided by it are beyond all measure."""
_PER_TOKEN = ("advantages", "ref_logprobs", "inference_logprobs")
_LIST_PER_TOKEN = "one list per token"
_SWITCHES = ("sft", "set_advantage_to_zero")

Checking = Generator[None, None, None]


class InvalidGroup(UserError, ValueError):
    """A group that cannot be trained on; `field` is the place at fault, `tokens[1][2]` (empty: none can be named)."""

    def __init__(self, field: str, summary: str) -> None:
        super().__init__(summary, field=field)

    @property
    def key(self) -> str | None:
        """The group's key in which the place is: `tokens`."""
        return re.split(r"\W", self.field)[0] or None


def pack_checked(group: wire.ScoredData) -> wire.PackedGroup:
    """`wire.pack` for a group that may be wrong.

    Raises:
        InvalidGroup: naming the field, what came and what was wanted.
    """
    lengths = [len(row) for row in group.tokens]
    _check_lengths("masks", [len(row) for row in group.masks], lengths, "one entry per token")
    changed: dict[str, Any] = {}
    for field in _PER_TOKEN:
        rows: list[list[float]] | None = getattr(group, field)
        if field == "advantages" and rows:
            rows = [spread(row, length) for row, length in zip(rows, lengths, strict=False)] + rows[len(lengths) :]
            changed[field] = rows
        if rows and any(rows):
            _check_lengths(field, [len(row) for row in rows], lengths, "one number per token")
        elif rows:
            changed[field] = None
    packed = wire.pack(msgspec.structs.replace(group, **changed) if changed else group)
    for _ in check_packed(packed):
        pass  # it is short, or its client asked for it in one go
    return packed


def spread(row: list[float], length: int) -> list[float]:
    """Advantages, one per token. Some environments send a row of another length that says one number over and
    over: it is the whole sequence's advantage."""
    return row[:1] * length if row and len(row) != length and len(set(row)) == 1 else row


def check_packed(group: wire.PackedGroup) -> Checking:
    """Check a group that is packed; a generator that pauses.

    Raises:
        InvalidGroup: naming the field, what came and what was wanted.
    """
    lengths = group.lengths
    total = sum(lengths)
    if not lengths:
        raise InvalidGroup("tokens", "an empty group, expected at least one sequence")
    if 0 in lengths:
        raise InvalidGroup(f"tokens[{lengths.index(0)}]", "an empty sequence, expected at least one token")
    for field in ("tokens", "masks"):
        if len(getattr(group, field)) != 4 * total:
            raise InvalidGroup(
                field, f"{len(getattr(group, field))} bytes, expected {4 * total} (int32 of {total} tokens)"
            )
    _check_token_ids(group.tokens, lengths)
    yield
    for field in _PER_TOKEN:
        data: bytes | None = getattr(group, field)
        if data is not None and len(data) not in (4 * total, 8 * total):
            raise InvalidGroup(field, f"{len(data)} bytes, expected {4 * total} (float32) or {8 * total} (float64)")
        for start in range(0, total if data else 0, CHUNK):
            numbers = numbers_of(data or b"", slice(start, min(start + CHUNK, total)), total, "f")
            if (bad := _first_unfit(numbers)) is not None:
                raise InvalidGroup(f"{field}{_place(start + bad, lengths)}", _unfit_number(numbers[bad]))
            yield
    _check_sequences(group, len(lengths))
    yield from _check_messages(group.messages or ())
    yield from _check_teacher(group)


def check_teacher_row(i: int, ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], length: int) -> None:
    """Check what a teacher says of a sequence of so many tokens, position by position.

    Raises:
        InvalidGroup: naming the position.
    """
    _check_length("distill_token_ids", i, len(ids), length, _LIST_PER_TOKEN)
    _check_length("distill_logprobs", i, len(logprobs), length, _LIST_PER_TOKEN)
    for j, (some_ids, some_logprobs) in enumerate(zip(ids, logprobs, strict=True)):
        if len(some_ids) != len(some_logprobs):
            raise InvalidGroup(
                f"distill_logprobs[{i}][{j}]", f"{len(some_logprobs)} numbers for {len(some_ids)} token ids"
            )
        if (bad := _first_unfit(some_logprobs)) is not None:
            raise InvalidGroup(f"distill_logprobs[{i}][{j}][{bad}]", _unfit_number(some_logprobs[bad]))


def check_teacher_count(ids: Sequence[object] | None, logprobs: Sequence[object] | None, count: int) -> None:
    """Check that a teacher says something of each of so many sequences, or nothing at all. Raises InvalidGroup."""
    if ids or logprobs:
        _check_count("distill_token_ids", len(ids or ()), count, _LIST_PER_TOKEN)
        _check_count("distill_logprobs", len(logprobs or ()), count, _LIST_PER_TOKEN)


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


def _check_token_ids(tokens: bytes, lengths: list[int]) -> None:
    """No id is below 0; what is beyond the model's vocabulary only the trainer knows."""
    if tokens[3::4].isascii():  # of each int32 the highest byte: its first bit is the sign
        return
    total = len(tokens) // 4
    numbers = numbers_of(tokens, slice(0, total), total, "i")
    bad = next(i for i, number in enumerate(numbers) if number < 0)
    raise InvalidGroup(
        f"tokens{_place(bad, lengths)}",
        f"{numbers[bad]}, expected a token id of the model, 0 or more; mark what is not trained in `masks`",
    )


def _check_sequences(group: wire.PackedGroup, count: int) -> None:
    """What there is one of for each sequence, and what says how they are to be taken."""
    if len(group.scores) != count:
        raise InvalidGroup("scores", f"{len(group.scores)} for {count} sequences, expected one each")
    if (bad := _first_unfit(group.scores)) is not None:
        raise InvalidGroup(f"scores[{bad}]", _unfit_number(group.scores[bad]))
    for field in ("overrides", "policy_versions"):
        if (given := getattr(group, field)) and len(given) != count:
            raise InvalidGroup(field, f"{len(given)} for {count} sequences, expected one each")
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


def _check_messages(conversations: Sequence[Sequence[Mapping[str, Any]]]) -> Checking:
    for i, conversation in enumerate(conversations):
        for j, message in enumerate(conversation):
            for key in ("role", "content"):
                if key not in message:
                    raise InvalidGroup(f"messages[{i}][{j}]", f"no `{key}`, expected role and content")
        yield


def _check_teacher(group: wire.PackedGroup) -> Checking:
    """Rows that were checked while they were read, and left as they came, are not looked at again."""
    ids, logprobs = group.distill_token_ids, group.distill_logprobs
    check_teacher_count(ids, logprobs, len(group.lengths))
    for i, (id_row, logprob_row) in enumerate(zip(ids or (), logprobs or (), strict=True)):
        if not isinstance(id_row, msgspec.Raw):
            check_teacher_row(i, id_row, logprob_row, group.lengths[i])
        yield


def _check_lengths(field: str, got: list[int], wanted: list[int], rule: str) -> None:
    if got != wanted:
        _check_count(field, len(got), len(wanted), rule)
        for i, pair in enumerate(zip(got, wanted, strict=True)):
            _check_length(field, i, *pair, rule)


def _check_count(field: str, got: int, wanted: int, rule: str) -> None:
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
