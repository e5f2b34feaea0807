"""Refusals: each names the field, the value received, the value wanted, and the fix."""

from typing import Any

from grpo_common.errors import UserError

_TYPES = {
    400: "BadRequestError",
    401: "UnauthorizedError",
    403: "ForbiddenError",
    404: "NotFoundError",
    409: "ConflictError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    503: "ServiceUnavailableError",
}


class ServeError(UserError, ValueError):
    """A request that the server cannot serve, with its HTTP status."""

    def __init__(self, status: int, field: str, got: object, wanted: str, fix: str) -> None:
        self.status = status
        # JSON cannot hold lone surrogates, which a path that is not UTF-8 contains.
        super().__init__(field=field, got=str(got).encode(errors="replace").decode(), wanted=wanted, fix=fix)

    def response(self) -> dict[str, dict[str, Any]]:
        """Return the body of the answer: OpenAI's error shape with three further fields."""
        kind = _TYPES.get(self.status, "InternalServerError")
        error = {"message": str(self), "type": kind, "code": self.status, "param": self.field}
        return {"error": {**error, "got": self.got, "wanted": self.wanted, "fix": self.fix}}


def engine_is_dead() -> ServeError:
    """Return the refusal of requests that need the engine after it has ended or failed."""
    return ServeError(503, "engine", "a failed engine", "a live engine", "restart the server")


class FatalError(UserError):
    """The server cannot start or continue. Its message is printed without a traceback."""

    exit_code = 2  # a wrong command


class IncompatibleError(FatalError):
    """The installed vLLM or uvicorn lacks something that this project uses."""

    exit_code = 1


class EngineEndedError(FatalError):
    """The engine's process has ended unexpectedly."""

    exit_code = 1


def gist(error: BaseException) -> str:
    """Return the line of a long message (of pydantic, for example) that names the problem."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    named = next((line for line in lines if line.startswith("Value error, ")), lines[0])
    return named.removeprefix("Value error, ").split(" [type=")[0][:300]
