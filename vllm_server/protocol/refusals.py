"""The body of a refusal."""

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The field at fault, the value received, the value wanted, and the fix; `message` contains all four."""

    message: str
    type: str
    code: int
    param: str | None = None
    got: str | None = None
    wanted: str | None = None
    fix: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every refusal of our routes: OpenAI's error shape with three further fields."""

    error: ErrorDetail
