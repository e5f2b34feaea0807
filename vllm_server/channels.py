"""The open channel by which a trainer's adapters or weights come, and versions of all weights on their way by it."""

import asyncio
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec

from vllm_server.adapters import check_config, check_header
from vllm_server.errors import ServeError
from vllm_server.fence import Fence, check_limit
from vllm_server.protocol import BridgeStatus, WeightsApplyRequest, WeightsDone, WeightsStageRequest
from vllm_server.protocol.channels import ChannelCloseRequest, ChannelRequest, ChannelResponse, CudaIpcSpec, GroupSpec
from vllm_server.protocol.flat import Header, decode_header

POLL_S = 0.002
"""First interval of asking the workers whether a version has arrived; later a tenth of the time so far."""
LONGEST_POLL_S = 0.05


@dataclass
class Channels:
    """The open channel, if there is one. A server has one trainer, so a new channel replaces the previous one."""

    call: Callable[..., Awaitable[list[Any]]]  # calls a method of every worker
    fence: Fence
    accepts: bool  # the server was started to receive weights
    max_rank: int | None  # of an adapter; None: the server was started without LoRA
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it opens, closes, or brings an adapter
    _open: tuple[str, ChannelRequest] | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    async def open(self, asked: ChannelRequest) -> ChannelResponse:
        """Open the channel in all workers.

        Raises:
            ServeError: 409 the server does not receive weights, or another one was meant; 422 the layout is damaged,
                the adapter is not servable or comes in another way, or a worker cannot open the channel.
        """
        self._check(asked)
        async with self.changing:
            await self._drop()
            name = uuid4().hex[:8]
            self._open = name, asked
            try:
                answers = await self._call("channel", "grpo_open_channel", name, msgspec.json.encode(asked).decode())
                sizes = [answer["staging_bytes"] for answer in answers]
                if min(sizes) == 0 < max(sizes):
                    got, fix = "room for another copy of the weights on some GPUs only", "use --broadcast-staging off"
                    raise ServeError(422, "staging", got, "the same for all workers", fix)
            except BaseException:
                await self._drop()
                raise
        return ChannelResponse(channel=name, staging_bytes=max(sizes))

    def _check(self, asked: ChannelRequest) -> None:
        config = asked.adapter_config
        if config is not None:
            check_config(config, max_rank=require_lora(self.max_rank))
        elif not self.accepts:
            got, fix = "a server that does not receive weights", "start it with --receive-weights"
            raise ServeError(409, "weights", got, "one that does", fix)
        self.fence.check_boot(asked.boot_id)
        try:
            headers: list[Header] = [decode_header(b64decode(header, validate=True)) for header in asked.buckets]
            if not headers or (config is not None and len(headers) > 1):
                raise ValueError(f"{len(headers)} buckets")
        except ValueError as error:
            wanted = "headers of safetensors files in base64"
            raise ServeError(422, "buckets", error, wanted, "encode them") from error
        if config is not None:
            check_header(headers[0], config["r"])
            whole = isinstance(asked.spec, CudaIpcSpec) and not asked.spec.tensors
            if not whole and not isinstance(asked.spec, GroupSpec):  # no door to files or memory of the caller's choice
                got, fix = f"{asked.transport} for adapters", "name a folder, or send the adapter, by /lora/load"
                raise ServeError(422, "spec", got, "cuda_ipc of a whole bucket, nccl or gloo", fix)

    async def close(self, asked: ChannelCloseRequest) -> BridgeStatus:
        """Close the channel. A channel that is not open needs no closing."""
        async with self.changing:
            if self._open is not None and asked.channel == self._open[0]:
                await self._drop()
        return BridgeStatus("closed")

    async def _drop(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            await self.call("grpo_close_channel", args=(opened[0],))

    def request(self, name: str, *, adapters: bool) -> ChannelRequest:
        """Return how the channel of adapters, or of all weights, was opened. Raise a ServeError, 404, if none is."""
        if self._open is None or self._open[0] != name or (self._open[1].adapter_config is not None) != adapters:
            fix = "open it again: the server was restarted, or another trainer has opened one"
            raise ServeError(404, "channel", name, "the open channel of POST /channels", fix)
        return self._open[1]

    async def stage(self, asked: WeightsStageRequest) -> WeightsDone:
        """Receive a version while generation continues.

        Raises:
            ServeError: 404 the channel is not open; 422 the version did not arrive, or there is no time limit. The
                served weights are as before.
        """
        check_limit(asked.timeout_s)
        self.request(asked.channel, adapters=False)
        started = time.monotonic()
        await self._call("weights", "grpo_weights_stage", asked.channel, asked.version)
        while not all(each["staged"] for each in await self._call("weights", "grpo_weights_staged", asked.channel)):
            if time.monotonic() - started > asked.timeout_s:
                got, fix = f"no whole version within {asked.timeout_s:g} s", "see the trainer's log"
                raise ServeError(422, "weights", got, "one", fix)
            await asyncio.sleep(min(LONGEST_POLL_S, max(POLL_S, (time.monotonic() - started) / 10)))
            self.request(asked.channel, adapters=False)
        return WeightsDone(seconds=time.monotonic() - started)

    async def apply(self, asked: WeightsApplyRequest) -> WeightsDone:
        """Write a version within the update that the token names.

        Raises:
            ServeError: 404 the channel is not open; 409 another update, or none, is in progress; 422 the version could
                not be written, and the weights may be torn.
        """
        self.request(asked.channel, adapters=False)
        self.fence.held(asked.token).applying = True
        try:
            answers = await self._call("weights", "grpo_weights_apply", asked.channel, asked.version)
        except BaseException as error:  # any worker may have written a part
            await self.fence.tear(asked.token, f"weights that were sent could not be written ({error})")
            raise
        self.fence.held(asked.token).applied = True
        return WeightsDone(
            seconds=max(answer["seconds"] for answer in answers), replayed=all(answer["replayed"] for answer in answers)
        )

    async def _call(self, part: str, method: str, *args: Any) -> list[dict[str, Any]]:
        answers = await self.call(method, args=args)
        for rank, answer in enumerate(answers):
            if "refused" in answer:
                got, fix = f"worker {rank}: {answer['refused']}", "see the trainer's log, or open the channel again"
                raise ServeError(422, part, got, "tensors of the served model, where this worker reaches them", fix)
        return answers


def require_lora(max_rank: int | None) -> int:
    """Return the largest rank of an adapter; raise a ServeError, 422, if the server was started without LoRA."""
    if max_rank is None:
        raise ServeError(422, "adapter_path", "an adapter", "a server with LoRA", "start it with --enable-lora")
    return max_rank
