"""Is a group fit to be trained on? What is not is refused at the door, with the field and the place named."""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from environments.api import wire

_PER_TOKEN = ("advantages", "ref_logprobs", "inference_logprobs")


class InvalidGroup(ValueError):
    """A group that cannot be trained on; `field` is the field at fault (empty where none can be named)."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field


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
            _check_finite(field, rows)
        elif rows:
            changed[field] = None
    group = msgspec.structs.replace(group, **changed) if changed else group
    _check_common(group, lengths)
    return wire.pack(group)


def spread(row: list[float], length: int) -> list[float]:
    """Advantages, one per token. Some environments send a row of another length that says one number over and
    over: it is the whole sequence's advantage."""
    return row[:1] * length if row and len(row) != length and len(set(row)) == 1 else row


def check_packed(group: wire.PackedGroup) -> None:
    """Check a group that came packed.

    Raises:
        InvalidGroup: naming the field, what came and what was wanted.
    """
    total = sum(group.lengths)
    for field in ("tokens", "masks"):
        if len(getattr(group, field)) != 4 * total:
            raise InvalidGroup(
                field, f"{field}: {len(getattr(group, field))} bytes, expected {4 * total} (int32 of {total} tokens)"
            )
    for field in _PER_TOKEN:
        data: bytes | None = getattr(group, field)
        if data is None:
            continue
        if len(data) not in (4 * total, 8 * total):
            raise InvalidGroup(
                field, f"{field}: {len(data)} bytes, expected {4 * total} (float32) or {8 * total} (float64)"
            )
        numbers = array("f" if len(data) == 4 * total else "d", data)
        if not math.isfinite(sum(numbers)):
            _check_finite(field, [numbers[span] for span in wire.spans(group.lengths)])
    _check_common(group, group.lengths)


def encode_checked(group: wire.PackedGroup) -> bytes:
    """The group as MessagePack, which is narrower than JSON in the fields that may hold anything.

    Raises:
        InvalidGroup: a whole number beyond 64 bits, or nesting without end.
    """
    try:
        return wire.encode(group, wire.MSGPACK)
    except (OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidGroup("", f"a field of this group cannot be kept: {error}") from None


def _check_common(group: wire.ScoredData | wire.PackedGroup, lengths: list[int]) -> None:
    """What lists and packed groups are checked for alike."""
    count = len(lengths)
    if not count:
        raise InvalidGroup("tokens", "tokens: an empty group, expected at least one sequence")
    if 0 in lengths:
        raise InvalidGroup("tokens", f"tokens[{lengths.index(0)}]: an empty sequence, expected at least one token")
    if len(group.scores) != count:
        raise InvalidGroup("scores", f"scores: {len(group.scores)} for {count} sequences, expected one each")
    _check_finite("scores", [group.scores])
    for field in ("overrides", "policy_versions"):
        if (given := getattr(group, field)) and len(given) != count:
            raise InvalidGroup(field, f"{field}: {len(given)} for {count} sequences, expected one each")
    for i, conversation in enumerate(group.messages or ()):
        for j, message in enumerate(conversation):
            for key in ("role", "content"):
                if key not in message:
                    raise InvalidGroup("messages", f"messages[{i}][{j}]: no `{key}`, expected role and content")
    _check_distillation(group, lengths)


def _check_distillation(group: wire.ScoredData | wire.PackedGroup, lengths: list[int]) -> None:
    ids, logprobs = group.distill_token_ids, group.distill_logprobs
    if not ids and not logprobs:
        return
    for field, rows in (("distill_token_ids", ids or []), ("distill_logprobs", logprobs or [])):
        _check_lengths(field, [len(row) for row in rows], lengths, "one list per token")
    for i, (id_row, logprob_row) in enumerate(zip(ids or (), logprobs or (), strict=True)):
        for j, (some_ids, some_logprobs) in enumerate(zip(id_row, logprob_row, strict=True)):
            if len(some_ids) != len(some_logprobs):
                raise InvalidGroup(
                    "distill_logprobs",
                    f"distill_logprobs[{i}][{j}]: {len(some_logprobs)} numbers for {len(some_ids)} token ids",
                )
        _check_finite(f"distill_logprobs[{i}]", logprob_row)


def _check_lengths(field: str, got: list[int], wanted: list[int], rule: str) -> None:
    if got == wanted:
        return
    if len(got) != len(wanted):
        raise InvalidGroup(field, f"{field}: {len(got)} sequences, tokens has {len(wanted)}; expected {rule}")
    i = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b)
    raise InvalidGroup(field, f"{field}[{i}]: {got[i]} entries, tokens[{i}] has {wanted[i]}; expected {rule}")


def _check_finite(field: str, rows: Sequence[Sequence[float]]) -> None:
    for i, row in enumerate(rows):
        if math.isfinite(sum(row)):  # not a number and infinity survive a sum: one quick pass clears a row
            continue
        for j, number in enumerate(row):
            if not math.isfinite(number):
                place = f"{field}[{j}]" if field == "scores" else f"{field}[{i}][{j}]"
                raise InvalidGroup(field.partition("[")[0], f"{place}: {number}, expected a finite number")
