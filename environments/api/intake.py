"""Posted bodies become groups in the queue; what is wrong with one of a list is told, the others are taken."""

from collections.abc import Generator

import msgspec

from environments.api import wire
from environments.api.http import ApiError
from environments.api.reading import Buffer, Steps, invalid, read_group, without_nan
from environments.api.records import UnknownEnvironment
from environments.api.service import Service
from environments.api.validate import InvalidGroup, encode_checked
from grpo_common.errors import Problem


def decode(body: bytes, message_type: type[wire.T], content_type: str | None) -> wire.T:
    """`wire.decode` with refusals.

    Raises:
        ApiError: 422 naming the field, or 400 for what is no JSON (or MessagePack) at all.
    """
    try:
        return wire.decode(body, message_type, content_type or wire.JSON)
    except msgspec.ValidationError as error:
        raise _unfit(invalid(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _malformed(error, content_type) from None


def take_one(
    service: Service, body: Buffer, content_type: str | None, key: bytes | None
) -> Generator[None, None, wire.ScoredDataResponse]:
    """POST /scored_data: a generator that pauses so that others may have their turn, and returns the answer.

    Raises:
        ApiError: 422 naming the field, 400 for what is no JSON (or MessagePack) at all.
    """
    try:
        group = yield from _read(body, wire.is_msgpack(content_type))
        yield
        payload = encode_checked(group)
        yield
        return service.take(group, key, payload)
    except InvalidGroup as error:
        raise _unfit(error) from None
    except UnknownEnvironment as error:
        raise ApiError(422, error.problems[0], "env_id") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _malformed(error, content_type) from None


def take_list(
    service: Service, body: bytes, content_type: str | None, key: bytes | None
) -> Generator[None, None, wire.ScoredDataListResponse]:
    """POST /scored_data_list: like `take_one`. What is wrong with a group is told, the others are taken.

    Raises:
        ApiError: 400 or 422 where the body is no list.
    """
    groups = _split(body, content_type)
    buffered: list[int] = []
    rejected: list[wire.RejectedGroup] = []
    for i, raw in enumerate(groups):
        yield
        try:
            answer = yield from take_one(service, memoryview(raw), content_type, key and key + b"/%d" % i)
        except ApiError as error:
            rejected.append(wire.RejectedGroup(group=i, field=error.key or "", detail=str(error)))
        else:
            if answer.buffer_size is not None:
                buffered.append(answer.buffer_size)
    return wire.ScoredDataListResponse(
        status="partial" if rejected else "received",
        groups_processed=len(groups) - len(rejected),
        buffered=len(buffered) or None,
        last_buffer_size=buffered[-1] if buffered else None,
        rejected=rejected or None,
    )


def _read(body: Buffer, msgpack: bool) -> Steps:
    try:
        return (yield from read_group(body, msgpack))
    except msgspec.DecodeError as error:
        if not msgpack and not isinstance(error, msgspec.ValidationError):
            whole = bytes(body)
            if (finite := without_nan(whole)) != whole:
                # Python's JSON writes NaN, which JSON has not: say where it stands rather than `malformed`.
                raise (yield from _non_finite(finite)) from error
        raise


def _non_finite(finite: bytes) -> Generator[None, None, InvalidGroup]:
    try:
        yield from read_group(finite)
    except InvalidGroup as error:
        return InvalidGroup(error.field, f"NaN or Infinity, expected a finite number ({error.summary})")
    return InvalidGroup("", "NaN or Infinity, which JSON does not have")


def _split(body: bytes, content_type: str | None) -> list[msgspec.Raw]:
    msgpack = wire.is_msgpack(content_type)
    try:
        if msgpack:
            return msgspec.msgpack.decode(body, type=list[msgspec.Raw])
        return msgspec.json.decode(body, type=list[msgspec.Raw])
    except msgspec.ValidationError as error:
        raise ApiError(422, Problem("body", wanted="a list of groups", summary=str(error))) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        try:
            if not msgpack and (finite := without_nan(body)) != body:
                # Split with null in the place of NaN; the groups that have it are refused for the null.
                return _split(finite, content_type)
        except InvalidGroup as nan:
            raise _unfit(nan) from None
        raise _malformed(error, content_type) from None


def _malformed(error: Exception, content_type: str | None) -> ApiError:
    kind = "MessagePack" if wire.is_msgpack(content_type) else "JSON"
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return ApiError(400, Problem("body", wanted=kind, summary=reason))


def _unfit(group: InvalidGroup) -> ApiError:
    return ApiError(422, group.problems[0], group.key)
