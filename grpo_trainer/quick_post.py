"""Small POST requests whose time counts, over one connection that is kept. httpx takes 0.3 ms longer for each."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping
from email.message import Message
from http.client import HTTPException, HTTPResponse
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from grpo_common.http import CLIENT_IDLE_S, CONNECT_S


class Answer(NamedTuple):
    """What a server has answered, with the names of `httpx.Response`."""

    status_code: int
    headers: Message
    content: bytes


class QuickPost:
    """Posts JSON to one server. Its errors are those of httpx.

    A request is never sent twice. Therefore a connection that the server may have closed is not used: one that was idle
    for longer than `CLIENT_IDLE_S`, or that has something to read before a request was sent.

    Args:
        url: http://HOST:PORT.
        headers: sent with every request.
        seconds: longest wait for the next bytes of an answer.
    """

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float) -> None:
        place = urlsplit(url)
        self._address = (place.hostname or "", place.port or 80)
        lines = {"Host": place.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._seconds = seconds
        self._kept: socket.socket | None = None
        self._used = 0.0
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Return whether a request can be posted without opening a connection."""
        kept = self._kept
        if kept is None or time.monotonic() - self._used > CLIENT_IDLE_S:
            return False
        waiting = select.poll()
        waiting.register(kept, select.POLLIN)
        return not waiting.poll(0)  # between two requests a server sends nothing except that it closes

    def open(self) -> None:
        """Open a connection, and close the one that was kept.

        Raises:
            httpx.ConnectError: no server listens.
            httpx.ConnectTimeout: no answer within `CONNECT_S`.
        """
        self._drop()
        try:
            kept = socket.create_connection(self._address, CONNECT_S)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        kept.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kept.settimeout(self._seconds)
        self._kept, self._used = kept, time.monotonic()

    def post(self, route: str, content: bytes) -> Answer:
        """Return the answer to a request, sent once over the open connection.

        Raises:
            httpx.TransportError: none came.
        """
        connection, self._kept = self._kept, None  # another thread does not send into this request
        assert connection is not None, "open comes first"
        head = f"POST {route} HTTP/1.1\r\n{self._head}Content-Length: {len(content)}\r\n\r\n"
        response = HTTPResponse(connection, method="POST")
        try:
            connection.sendall(head.encode() + content)
            response.begin()
            answer = Answer(response.status, response.headers, response.read())
        except BaseException as error:
            response.close()
            connection.close()
            if isinstance(error, TimeoutError):
                raise httpx.ReadTimeout(str(error)) from error
            if isinstance(error, HTTPException):
                raise httpx.RemoteProtocolError(str(error)) from error
            if isinstance(error, OSError):
                raise httpx.ReadError(str(error)) from error
            raise
        if response.will_close or self._is_closed:
            connection.close()
        else:
            self._drop()  # another one, if a request was given up meanwhile
            self._kept, self._used = connection, time.monotonic()
        return answer

    def close(self) -> None:
        """Close the kept connection, and that of a request in progress once it is answered."""
        self._is_closed = True
        self._drop()

    def _drop(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
