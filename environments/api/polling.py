"""GET /status-env without a framework in between: a thousand environments ask ten times a second each.

Requests of the usual form are answered here; any other form (gzip, MessagePack, a query) is left to the ordinary
route, which gives the same answers and says what is wrong.
"""

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from environments.api import wire
from environments.api.metrics import Metrics
from environments.api.service import Service
from grpo_common.disconnects import replayed

_PATH = "/status-env"


class StatusEnvShortcut:
    """An ASGI application in front of another."""

    def __init__(self, app: ASGIApp, service: Service, metrics: Metrics) -> None:
        self.app = app
        self.service = service
        self.answered = metrics.shortcut(_PATH)
        self.decode = msgspec.json.Decoder(wire.EnvIdentifier).decode
        self.encode = msgspec.json.Encoder().encode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != _PATH or not _usual(scope):
            return await self.app(scope, receive, send)
        message = await receive()
        try:
            if message.get("more_body"):
                raise LookupError
            answer = self.service.status_env(self.decode(message["body"]).env_id)
        except (LookupError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return await self.app(scope, replayed(message, receive), send)  # which says what is wrong
        body = self.encode(answer)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return self.answered()


def _usual(scope: Scope) -> bool:
    """Whether the request may have the usual form; a body of another form cannot be decoded and goes to the route."""
    accepted = [value for name, value in scope["headers"] if name == b"accept"]
    return scope["method"] == "GET" and not scope["query_string"] and accepted in ([], [b"*/*"])
