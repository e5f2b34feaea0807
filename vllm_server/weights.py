"""Weights that a trainer sends: one open channel, and its versions on their way into the workers."""

import asyncio
import time
from base64 import b64decode
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import msgspec

from vllm_server.errors import ServeError
from vllm_server.fence import Fence
from vllm_server.protocol import (
    BridgeStatus,
    ChannelCloseRequest,
    WeightsApplyRequest,
    WeightsDone,
    WeightsOpenRequest,
    WeightsOpenResponse,
    WeightsStageRequest,
)
from vllm_server.protocol.flat import decode_header

POLL_S = 0.002
"""First interval of asking the workers whether a version has arrived; later a tenth of the time so far."""
LONGEST_POLL_S = 0.05


class RpcEngine(Protocol):
    """The engine's method that channels use."""

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]: ...


@dataclass
class WeightChannels:
    """The open channel, if there is one. A server has one trainer, so a new channel replaces the previous one.

    Args:
        accepts: whether the server was started to receive weights.
    """

    engine: RpcEngine
    fence: Fence
    accepts: bool
    _open: str | None = None
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self, asked: WeightsOpenRequest) -> WeightsOpenResponse:
        """Open the channel in all workers.

        Raises:
            ServeError: 409 the server does not receive weights, or another one was meant; 422 the layout is damaged, or
                a worker cannot open it.
        """
        if not self.accepts:
            raise ServeError(
                409, "weights", got="a server that does not receive weights", wanted="one that does",
                fix="start it with --receive-weights",
            )  # fmt: skip
        self.fence.check_boot(asked.boot_id)
        try:
            for header in asked.buckets:
                decode_header(b64decode(header, validate=True))
        except ValueError as error:
            raise ServeError(
                422, "buckets", got=error, wanted="headers of safetensors files in base64", fix="encode them"
            ) from error
        async with self._changing:
            await self._drop()
            name = uuid4().hex[:8]
            self._open = name
            try:
                found = await self._call("grpo_weights_open", name, msgspec.json.encode(asked).decode())
                sizes = [answer["staging_bytes"] for answer in found]
                if min(sizes) == 0 < max(sizes):
                    raise ServeError(
                        422, "staging", got="room for another copy of the weights on some GPUs only",
                        wanted="the same for all workers", fix="use --broadcast-staging off",
                    )  # fmt: skip
            except BaseException:
                await self._drop()
                raise
        return WeightsOpenResponse(channel=name, staged=min(sizes) > 0, staging_bytes=max(sizes))

    async def close(self, asked: ChannelCloseRequest) -> BridgeStatus:
        """Close the channel. A channel that is not open needs no closing."""
        async with self._changing:
            if asked.channel == self._open:
                await self._drop()
        return BridgeStatus("closed")

    async def stage(self, asked: WeightsStageRequest) -> WeightsDone:
        """Receive a version while generation continues.

        Raises:
            ServeError: 404 the channel is not open; 422 the version did not arrive. The served weights are as before.
        """
        self._check_open(asked.channel)
        started = time.monotonic()
        await self._call("grpo_weights_stage", asked.channel, asked.version)
        while not all(answer["staged"] for answer in await self._call("grpo_weights_staged", asked.channel)):
            if time.monotonic() - started > asked.timeout_s:
                raise ServeError(
                    422, "weights", got=f"no whole version within {asked.timeout_s:g} s", wanted="one",
                    fix="raise the time limit, or see the trainer's log",
                )  # fmt: skip
            await asyncio.sleep(min(LONGEST_POLL_S, max(POLL_S, (time.monotonic() - started) / 10)))
            self._check_open(asked.channel)
        return WeightsDone(seconds=time.monotonic() - started)

    async def apply(self, asked: WeightsApplyRequest) -> WeightsDone:
        """Write a version within the update that the token names.

        Raises:
            ServeError: 404 the channel is not open; 409 another update, or none, is in progress; 422 the version could
                not be written, and the weights may be torn.
        """
        self._check_open(asked.channel)
        self.fence.note_applying(asked.token)
        try:
            answers = await self._call("grpo_weights_apply", asked.channel, asked.version)
        except BaseException as error:  # any worker may have written a part
            await self.fence.tear(asked.token, f"weights that were sent could not be written ({error})")
            raise
        self.fence.note_applied(asked.token)
        return WeightsDone(
            seconds=max(answer["seconds"] for answer in answers), replayed=all(answer["replayed"] for answer in answers)
        )

    def _check_open(self, name: str) -> None:
        if name != self._open:
            raise ServeError(
                404, "channel", got=name, wanted="the open channel of POST /bridge/weights/open",
                fix="open it again: the server was restarted, or another trainer has opened one",
            )  # fmt: skip

    async def _drop(self) -> None:
        name, self._open = self._open, None
        if name is not None:
            await self.engine.collective_rpc("grpo_weights_close", args=(name,))

    async def _call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        answers = await self.engine.collective_rpc(method, args=args)
        for rank, answer in enumerate(answers):
            if "refused" in answer:
                raise ServeError(
                    422, "weights", got=f"worker {rank}: {answer['refused']}", wanted="weights of the served model",
                    fix="see the trainer's log, or open the channel again",
                )  # fmt: skip
        return answers
