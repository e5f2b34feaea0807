"""Posted bodies become groups in the queue; what is wrong with one of a list is told, the others are taken."""

from collections.abc import Iterator

import msgspec

from environments.api import wire
from environments.api.http import ApiError
from environments.api.records import UnknownEnvironment
from environments.api.service import Service
from environments.api.validate import InvalidGroup, invalid, read_group, without_nan


def decode(body: bytes, message_type: type[wire.T], content_type: str | None) -> wire.T:
    """`wire.decode` with refusals.

    Raises:
        ApiError: 422 naming the field, or 400 for what is no JSON (or MessagePack) at all.
    """
    try:
        return wire.decode(body, message_type, content_type or wire.JSON)
    except msgspec.ValidationError as error:
        problem = invalid(error)
        raise ApiError(422, str(problem), problem.field or None) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _malformed(error, content_type) from None


def take_one(service: Service, body: bytes, content_type: str | None, key: bytes | None) -> wire.ScoredDataResponse:
    """POST /scored_data.

    Raises:
        ApiError: 422 naming the field, 400 for what is no JSON (or MessagePack) at all.
    """
    msgpack = wire.is_msgpack(content_type)
    try:
        return service.take(_read(body, msgpack), key)
    except InvalidGroup as error:
        raise ApiError(422, str(error), error.field or None) from None
    except UnknownEnvironment as error:
        raise ApiError(422, str(error), "env_id") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _malformed(error, content_type) from None


def take_list(
    service: Service, body: bytes, content_type: str | None, key: bytes | None
) -> Iterator[wire.ScoredDataListResponse | None]:
    """POST /scored_data_list: None after each group, so that others may have their turn, then the answer.

    Raises:
        ApiError: 400 or 422 where the body is no list.
    """
    msgpack = wire.is_msgpack(content_type)
    groups = _split(body, msgpack, content_type)
    buffered: list[int] = []
    rejected: list[wire.RejectedGroup] = []
    for i, raw in enumerate(groups):
        try:
            answer = service.take(_read(bytes(raw), msgpack), None if key is None else key + b"/%d" % i)
        except InvalidGroup as error:
            rejected.append(wire.RejectedGroup(group=i, field=error.field, detail=str(error)))
        except UnknownEnvironment as error:
            rejected.append(wire.RejectedGroup(group=i, field="env_id", detail=str(error)))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            rejected.append(wire.RejectedGroup(group=i, field="", detail=_malformed(error, content_type).detail))
        else:
            if answer.buffer_size is not None:
                buffered.append(answer.buffer_size)
        yield None
    yield wire.ScoredDataListResponse(
        status="partial" if rejected else "received",
        groups_processed=len(groups) - len(rejected),
        buffered=len(buffered) or None,
        last_buffer_size=buffered[-1] if buffered else None,
        rejected=rejected or None,
    )


def _read(body: bytes, msgpack: bool) -> wire.PackedGroup:
    try:
        return read_group(body, msgpack)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        if not msgpack and (problem := _non_finite(body)):
            raise problem from error
        raise


def _non_finite(body: bytes) -> InvalidGroup | None:
    """Python's JSON writes NaN, which JSON has not: say where it stands rather than `malformed`."""
    finite = without_nan(body)
    if finite == body:
        return None
    try:
        read_group(finite)
    except InvalidGroup as error:
        return InvalidGroup(error.field, f"NaN or Infinity, expected a finite number ({error})")
    except (msgspec.DecodeError, RecursionError):
        return None
    return InvalidGroup("", "NaN or Infinity, which JSON does not have")


def _split(body: bytes, msgpack: bool, content_type: str | None) -> list[msgspec.Raw]:
    try:
        if msgpack:
            return msgspec.msgpack.decode(body, type=list[msgspec.Raw])
        return msgspec.json.decode(body, type=list[msgspec.Raw])
    except msgspec.ValidationError as error:
        raise ApiError(422, f"{error}: expected a list of groups") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if not msgpack and (finite := without_nan(body)) != body:
            # The list is split with null in the place of NaN; the groups that have it are refused for the null.
            return _split(finite, msgpack, content_type)
        raise _malformed(error, content_type) from None


def _malformed(error: Exception, content_type: str | None) -> ApiError:
    kind = "MessagePack" if wire.is_msgpack(content_type) else "JSON"
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return ApiError(400, f"the body is not {kind}: {reason}")
