"""From a posted body to a packed group. A long body is read row by row, so that nobody waits for its end."""

import re
from collections.abc import Generator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from environments.api import wire
from environments.api.packing import pack_doubles, pack_ints
from environments.api.validate import InvalidGroup, check_packed, pack_checked, spread

LONG_BODY = 1 << 20
"""Bytes of JSON from which a group is read row by row; a shorter one takes some 3 ms."""
LONGEST_EXPLAINED = 4 << 20
"""Bytes of JSON in which NaN is looked for exactly; longer ones are refused with the place of the first."""
_PATH = re.compile(r" - at `\$(?:\[\d+\])?\.?(\w*)")
_NON_FINITE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\b(?:NaN|Infinity)\b')
_ROWS = ("tokens", "masks", "advantages", "ref_logprobs", "inference_logprobs")
_INTS = list[Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]]

Steps = Generator[None, None, wire.PackedGroup]


class _RawGroup(Struct, kw_only=True):
    """`wire.ScoredData` with its rows of numbers left as they came."""

    tokens: list[Raw]
    masks: list[Raw]
    advantages: list[Raw] | None = None
    ref_logprobs: list[Raw] | None = None
    inference_logprobs: list[Raw] | None = None


class _Rest(Struct, kw_only=True):
    """The other fields of `wire.ScoredData`."""

    scores: list[float]
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    distill_token_ids: list[list[_INTS]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
    policy_versions: list[Annotated[int, Meta(ge=-(2**53), le=2**53)]] | None = None


def read_group(body: bytes, msgpack: bool = False) -> Steps:
    """The group that a body carries, checked and packed; a generator that pauses between rows and returns it.

    Raises:
        InvalidGroup: not fit to be trained on, or not a group at all.
        msgspec.DecodeError: not JSON (or not MessagePack).
    """
    if msgpack:
        return _read_msgpack(body)
    if len(body) >= LONG_BODY:
        return (yield from _read_rows(body))
    try:
        return pack_checked(msgspec.json.decode(body, type=wire.ScoredData))
    except msgspec.ValidationError as error:
        raise invalid(error) from None


def invalid(error: msgspec.ValidationError) -> InvalidGroup:
    """A decoder's complaint as ours; it already names the path."""
    message = str(error)
    match = _PATH.search(message)
    field = match[1] if match else ""
    if not field and (missing := re.search(r"missing required field `(\w+)`", message)):
        field = missing[1]
    return InvalidGroup(field, message)


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


def _read_rows(body: bytes) -> Steps:
    try:
        raw = msgspec.json.decode(body, type=_RawGroup)
        yield
        rest = msgspec.json.decode(body, type=_Rest)
    except msgspec.ValidationError as error:
        raise invalid(error) from None
    yield
    lengths: list[int] = []
    packed: dict[str, bytes | None] = {}
    for field in _ROWS:
        rows: list[Raw] = getattr(raw, field) or []
        pieces: list[bytes] = []
        got: list[int] = []
        for i, row in enumerate(rows):
            whole = field in ("tokens", "masks")
            numbers: list[Any] = _row(row, _INTS if whole else list[float], f"{field}[{i}]")
            if field == "advantages" and i < len(lengths):
                numbers = spread(numbers, lengths[i])
            got.append(len(numbers))
            pieces.append((pack_ints if whole else pack_doubles)([numbers]))
            yield
        lengths = lengths or got
        if got != lengths and any(got):
            raise InvalidGroup(field, f"{field}: rows of {got} entries, tokens has {lengths}; expected one per token")
        packed[field] = b"".join(pieces) if any(got) or field == "masks" else None
    yield
    group = wire.PackedGroup(
        lengths=lengths,
        tokens=packed.pop("tokens") or b"",
        masks=packed.pop("masks") or b"",
        **packed,
        **{name: getattr(rest, name) for name in _Rest.__struct_fields__},
    )
    check_packed(group)
    return group


def _row(raw: Raw, row_type: Any, place: str) -> list[Any]:
    try:
        return msgspec.json.decode(raw, type=row_type)
    except msgspec.ValidationError as error:
        raise InvalidGroup(place.partition("[")[0], f"{place}: {error}") from None


def _read_msgpack(body: bytes) -> wire.PackedGroup:
    try:
        group = msgspec.msgpack.decode(body, type=wire.PackedGroup)
    except msgspec.ValidationError as error:
        try:  # MessagePack with lists, as a generic client sends it
            return pack_checked(msgspec.msgpack.decode(body, type=wire.ScoredData))
        except msgspec.ValidationError as plain:
            # Lists where bytes should be: complain about the plain form. Bytes where lists should be: the packed.
            raise invalid(error if "got `bytes`" in str(plain) else plain) from None
    check_packed(group)
    return group
