"""The trainer's view of the inference server, over HTTP."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import msgspec
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from grpo_common.formats import check_format
from grpo_common.http import CLIENT_IDLE_S, CONNECT_S, complaint
from grpo_common.roster import read_members, read_served
from grpo_common.status import NOTICE, WAITS
from grpo_trainer import background
from grpo_trainer.config.server import Server
from grpo_trainer.errors import ServerError
from grpo_trainer.phases import SERVER, START, report_at
from grpo_trainer.signals import running_time
from vllm_server import protocol
from vllm_server.protocol.channels import ChannelCloseRequest, ChannelRequest, ChannelResponse

log = logging.getLogger(__name__)

T = TypeVar("T")
POLL_SECONDS = 0.25
PIECE_BYTES = 1 << 20  # size of the pieces in which a large body is sent

ANSWER_SECONDS = 660.0
"""Longest wait for an answer: a server may receive a large model within a request."""

SILENT_SECONDS = 30.0
"""A server of a list that changes (`--server.roster`) counts as gone when it has answered nothing for this long."""
KNOCK_SECONDS = 5.0
"""Between two checks whether a server that is asked for something still answers, and time for the answer."""

ATTEMPTS = 3
FIRST_WAIT_SECONDS = 0.2

NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""After these errors any request can be sent again."""

UNANSWERED = (*NEVER_SENT, httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)
"""After these errors an idempotent request can be sent again. Time-outs are not included: the server is busy then."""


class ServerClient:
    """Talks to one inference server. `check_stop` is called while waiting; it raises to end the wait."""

    def __init__(self, config: Server, check_stop: Callable[[], None] = lambda: None) -> None:
        self._headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._http = httpx.Client(
            base_url=config.url,
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_S),
            headers=self._headers,
            limits=httpx.Limits(keepalive_expiry=CLIENT_IDLE_S),
            trust_env=False,
        )
        self._config = config
        self._check_stop = check_stop
        self._is_silent = False
        self._kept: HTTPConnection | None = None
        self._used = 0.0

    @property
    def url(self) -> str:
        return self._config.url

    def wait_until_ready(self) -> protocol.BridgeInfo:
        """Wait for /health, and return the server's description.

        Raises:
            ServerError: the server was not ready within `--server.startup-timeout`, or is not `grpo serve`.
        """
        return self._wait_for(protocol.HEALTH_ROUTE)

    def wait_until_there(self) -> protocol.BridgeInfo:
        """Wait until the server answers, even if it refuses to generate (see `wait_until_settled`)."""
        return self._wait_for(protocol.BRIDGE_INFO_ROUTE)

    @START.of(SERVER)
    def _wait_for(self, route: str) -> protocol.BridgeInfo:
        started = running_time()
        said = 0.0
        while not self._answers(route):
            self._check_stop()
            waited = running_time() - started
            if waited > self._config.startup_timeout:
                raise ServerError(
                    f"no inference server at {self._config.url} after {waited:.0f} s",
                    field="--server.startup-timeout",
                    fix=f"start one with `grpo serve --port {self._config.port}`, or name its port with --server.port",
                )
            if waited >= report_at(said):
                said = waited
                what = "waiting %.0f s for the inference server at %s"
                log.info(what, waited, self._config.url, extra=NOTICE | WAITS)
            time.sleep(POLL_SECONDS)
        info = self._ask("GET", protocol.BRIDGE_INFO_ROUTE, protocol.BridgeInfo)
        check_format(f"the inference server at {self._config.url}", info.format, protocol.FORMAT, ServerError)
        return info

    def _answers(self, route: str) -> bool:
        try:
            return self._http.get(route, timeout=5.0).status_code in (200, 401, 403)  # `_ask` reports refusals
        except httpx.TransportError:
            return False  # not listening yet

    def wait_until_settled(self) -> protocol.BridgeDebug:
        """Wait for the end of an update of shared weights, and return the server's state.

        An update by a dead trainer ends by its timeout. The state's `fault` is the reason if generation is refused.
        """
        said = False
        while (state := self._ask("GET", protocol.BRIDGE_DEBUG_ROUTE, protocol.BridgeDebug)).updating:
            self._check_stop()
            if not said:
                said = True
                log.info("waiting for an update of the server's weights to end; of a dead trainer it is given up soon")
            time.sleep(POLL_SECONDS)
        return state

    def begin_update(self, request: protocol.UpdateBeginRequest) -> protocol.UpdateBeginResponse:
        """Pause generation while the shared weights are written."""
        return self._ask("POST", protocol.BRIDGE_UPDATE_BEGIN_ROUTE, protocol.UpdateBeginResponse, request)

    def end_update(self, request: protocol.UpdateEndRequest) -> protocol.UpdateEndResponse:
        """Resume generation on the new weights."""
        return self._ask("POST", protocol.BRIDGE_UPDATE_END_ROUTE, protocol.UpdateEndResponse, request)

    def stage_weights(self, request: protocol.WeightsStageRequest) -> protocol.WeightsDone:
        """Have the server receive a version while it generates."""
        return self._ask("POST", protocol.BRIDGE_WEIGHTS_STAGE_ROUTE, protocol.WeightsDone, request)

    def apply_weights(self, request: protocol.WeightsApplyRequest) -> protocol.WeightsDone:
        """Have the server write a version, within an update."""
        return self._ask("POST", protocol.BRIDGE_WEIGHTS_APPLY_ROUTE, protocol.WeightsDone, request)

    def load_adapter(
        self, request: protocol.LoraLoadRequest, body: memoryview | None = None
    ) -> protocol.LoraLoadResponse:
        """Publish the adapter that a request names, or that is its body (the bytes of a safetensors file)."""
        request = msgspec.structs.replace(request, request_id=uuid4().hex)  # identifies a repeated request
        if body is None:
            return self._ask("POST", protocol.LORA_LOAD_ROUTE, protocol.LoraLoadResponse, request, repeatable=True)
        fields = msgspec.to_builtins(request)
        query = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in fields.items()}
        headers = {"Content-Type": protocol.SAFETENSORS_MEDIA_TYPE, "Content-Length": str(len(body))}
        pieces = _Pieces(body)
        route = protocol.LORA_LOAD_ROUTE
        return self._send("POST", route, protocol.LoraLoadResponse, pieces, headers, query, repeatable=True)

    def open_channel(self, request: ChannelRequest) -> ChannelResponse:
        """Have the server's workers map our memory, join our group, or find our files."""
        return self._ask("POST", protocol.CHANNELS_ROUTE, ChannelResponse, request)

    def close_channel(self, name: str) -> None:
        """Have the server free a channel."""
        request = ChannelCloseRequest(name)
        self._ask("POST", protocol.CHANNELS_CLOSE_ROUTE, protocol.BridgeStatus, request, repeatable=True)

    def unload_adapter(self, name: str) -> protocol.LoraUnloadResponse:
        """Withdraw a version."""
        request = protocol.LoraUnloadRequest(adapter_name=name)
        return self._ask("POST", protocol.LORA_UNLOAD_ROUTE, protocol.LoraUnloadResponse, request, repeatable=True)

    def lora_status(self) -> protocol.LoraStatus:
        """The versions that the server holds."""
        return self._ask("GET", protocol.LORA_STATUS_ROUTE, protocol.LoraStatus)

    def generate(
        self, prompt_token_ids: Sequence[int], *, model: str | None = None, **sampling: Any
    ) -> protocol.GenerateResponse:
        """Sample completions of a tokenised prompt; `sampling` as in vLLM's SamplingParams."""
        prompt = protocol.TokenPrompt(prompt_token_ids=list(prompt_token_ids))
        request = protocol.GenerateRequest(prompt=prompt, model=model, sampling=sampling)
        body = request.to_body()
        return self._ask("POST", protocol.GENERATE_ROUTE, protocol.GenerateResponse, body, repeatable=True)

    def _ask(self, method: str, route: str, answer_type: type[T], body: Any = None, *, repeatable: bool = False) -> T:
        """One request; sent again if no answer came to one that is `repeatable`, as every GET is.

        Raises:
            ServerError: no answer, a refusal (with the server's own reason), or an answer of another shape.
        """
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if content else {}
        return self._send(method, route, answer_type, content, headers, repeatable=repeatable or method == "GET")

    def _send(
        self,
        method: str,
        route: str,
        answer_type: type[T],
        content: bytes | Iterable[bytes] | None,
        headers: dict[str, str],
        query: dict[str, str] | None = None,
        *,
        repeatable: bool,
    ) -> T:
        attempts = Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(FIRST_WAIT_SECONDS),
            retry=retry_if_exception_type(UNANSWERED if repeatable else NEVER_SENT),
            reraise=True,
        )
        if isinstance(content, bytes | None):
            ask = partial(attempts, self._small, method, route, content, headers)
        else:
            ask = partial(attempts, self._http.request, method, route, content=content, headers=headers, params=query)
        try:
            answer = ask() if self._config.roster is None else self._unless_silent(ask)
        except httpx.TransportError as error:
            raise ServerError(
                "no answer from the inference server",
                field=f"{method} {self._config.url}{route}",
                got=": ".join(filter(None, [type(error).__name__, str(error)])),
                fix="see in its log whether it still runs",
            ) from error
        if answer.status_code >= 400:
            raise _refusal(f"{method} {self._config.url}{route}", answer)
        try:
            return msgspec.json.decode(answer.content, type=answer_type)
        except msgspec.DecodeError as error:
            raise ServerError(
                f"not the answer of `grpo serve`: {error}", field=f"{method} {self._config.url}{route}"
            ) from error

    def _small(self, method: str, route: str, content: bytes | None, headers: dict[str, str]) -> httpx.Response:
        """Return the answer to a request that is sent once, over one connection that is kept.

        `http.client` takes 0.3 ms less than httpx, which counts while generation is held. A connection that the server
        may have closed is not used: after a while, or if there is something to read before a request was sent.

        Raises:
            httpx.TransportError: no answer came.
        """
        kept, self._kept, answered = self._kept, None, False  # another thread does not send into this request
        if kept is None or time.monotonic() - self._used > CLIENT_IDLE_S or _is_readable(kept):
            kept = self._connected()
        try:
            kept.request(method, route, content, self._headers | headers)
            answer = kept.getresponse()
            response = httpx.Response(answer.status, headers=answer.getheaders(), content=answer.read())
            answered = True
            return response
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error)) from error
        except HTTPException as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        finally:
            if answered:
                self._kept, self._used = kept, time.monotonic()
            else:
                kept.close()

    def _connected(self) -> HTTPConnection:
        place = urlsplit(self._config.url)
        connection = HTTPConnection(place.hostname or "", place.port, timeout=CONNECT_S)
        try:
            connection.connect()
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        connection.sock.settimeout(ANSWER_SECONDS)
        return connection

    def _unless_silent(self, ask: Callable[[], T]) -> T:
        """Return the answer to a request; a server that is stopped, or behind a broken network, never gives one.

        A server may take minutes to receive a large model, and answers other requests meanwhile.

        Raises:
            httpx.TransportError: no answer came, and the server is silent.
        """
        heard = running_time() - (SILENT_SECONDS if self._is_silent else 0.0)
        answer = background.begin(ask)
        while not wait([answer], KNOCK_SECONDS).done:
            if self._is_there():
                heard = running_time()
            elif running_time() - heard > SILENT_SECONDS and not answer.done():
                self._is_silent = True
                raise httpx.ReadTimeout(f"the server is silent for more than {SILENT_SECONDS:.0f} s")
        self._is_silent = False
        return answer.result()

    def _is_there(self) -> bool:
        """Return whether the server answers anything."""
        try:
            self._http.get(protocol.HEALTH_ROUTE, timeout=KNOCK_SECONDS)
        except httpx.TransportError:
            return False
        return True

    def close(self) -> None:
        self._http.close()
        if self._kept is not None:
            self._kept.close()


def _is_readable(connection: HTTPConnection) -> bool:
    """Return whether a server that was asked nothing has sent something, such as the end of the connection."""
    if connection.sock is None:  # it was ended with its last answer
        return True
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return bool(waiting.poll(0))


def at_url(config: Server, url: str) -> Server:
    """Return the settings of the server at http://HOST:PORT."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    return config.model_copy(update={"host": host, "port": int(port), "also": ()})


def present(config: Server) -> Server:
    """Return the settings with the addresses of the servers that a run has now, if it lists them.

    A trainer that starts again in the middle of a run finds other servers than its configuration names. It takes those
    that answer, so that a silent one does not hold it up; the others join once they answer. If none does, it takes all.
    """
    if config.roster is None:
        return config
    members = [member for member in read_members(config.roster) if member.state in ("starting", "running")]
    if read_served(config.roster) and (running := [member for member in members if member.state == "running"]):
        with ThreadPoolExecutor(len(running), "knock") as asking:  # all at the same time
            urls = [f"{member.url}{protocol.HEALTH_ROUTE}" for member in running]
            answered = asking.map(partial(answers, seconds=KNOCK_SECONDS), urls)
            members = [member for member, is_there in zip(running, answered, strict=True) if is_there] or members
    if not members:
        return config
    there = [member.url.removeprefix("http://") for member in members]
    return at_url(config, there[0]).model_copy(update={"also": tuple(there[1:])})


def answers(url: str, seconds: float = 2.0) -> bool:
    """Return whether anything answers at an address within a time; that needs no key."""
    try:
        httpx.get(url, timeout=seconds, trust_env=False)
    except httpx.TransportError:
        return False
    return True


def wait_for_servers(config: Server, check_stop: Callable[[], None]) -> None:
    """Wait until all servers answer, which they do once they have allocated their memory.

    Raises:
        ServerError: one did not answer within `--server.startup-timeout`.
    """
    for each in config.each:
        with closing(ServerClient(each, check_stop)) as client:
            client.wait_until_there()


@dataclass(frozen=True)
class _Pieces:
    """A large body in pieces; it can be iterated again if the request is repeated."""

    body: memoryview

    def __iter__(self) -> Iterator[bytes]:
        return (bytes(self.body[start : start + PIECE_BYTES]) for start in range(0, len(self.body), PIECE_BYTES))


def _refusal(request: str, answer: httpx.Response) -> ServerError:
    """Return the server's error, with field, got, wanted and fix if the answer has them."""
    said = complaint(answer.content, answer.headers.get("content-type"))
    return ServerError(
        f"the inference server refuses {request} with {answer.status_code}",
        field=said.key or "",
        got=said.reason if said.got is None else said.got,
        wanted=said.wanted,
        fix=said.fix,
    )
