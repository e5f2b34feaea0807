"""The body of a refusal."""

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Which field was wrong, what came, what was wanted, and how to mend it; `message` says all four."""

    message: str
    type: str
    code: int
    param: str | None = None
    got: str | None = None
    wanted: str | None = None
    fix: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every refusal of our routes; the shape is that of OpenAI errors with three fields more."""

    error: ErrorDetail
