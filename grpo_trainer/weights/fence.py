"""The server's fence, from the trainer's side: within it the server computes nothing and its weights may be written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.metrics.types import Metric, Sum
from grpo_trainer.server_client import ServerClient
from vllm_server.protocol import InFlight, UpdateBeginRequest, UpdateEndRequest

log = logging.getLogger(__name__)


class ServerFence:
    """One server's fence.

    Args:
        in_flight: what happens to requests in flight.
        settle: called when the weights have been written, before the server resumes: waits for the trainer's device.

    Attributes:
        metrics: of the last update; empty once it was published.
    """

    def __init__(self, server: ServerClient, in_flight: InFlight, settle: Callable[[], None] = lambda: None) -> None:
        self._server = server
        self._in_flight: InFlight = in_flight
        self._settle = settle
        self.metrics: dict[str, Metric] = {}

    @contextmanager
    def hold(self, boot_id: str, version: int, seconds: float) -> Iterator[str]:
        """Keep the server from reading its weights within the block; afterwards it generates with them as `version`.

        If the block fails, the server learns that its weights are torn, and refuses to generate until the next update.

        Args:
            boot_id: the server that is meant.
            seconds: time limit, after which the weights count as torn.

        Yields:
            The update's token.

        Raises:
            BridgeError: the server confirms another version.
        """
        started = time.perf_counter()
        asked = UpdateBeginRequest(boot_id=boot_id, in_flight=self._in_flight, timeout_s=seconds)
        begun = self._server.begin_update(asked)
        writing = time.perf_counter()
        try:
            yield begun.token
            self._settle()
        except BaseException:
            self._say_torn(begun.token, version)
            raise
        written = time.perf_counter()
        ended = self._server.end_update(UpdateEndRequest(token=begun.token, version=version))
        finished = time.perf_counter()
        if ended.policy_version != version:
            raise BridgeError(
                "the server confirms another version than the one written",
                field="version",
                got=ended.policy_version,
                wanted=str(version),
            )
        self.metrics = {
            "train/sync_time": Sum(finished - started),
            "publish/pause_time": Sum(begun.pause_seconds),
            "publish/write_time": Sum(written - writing),
            "publish/end_time": Sum(finished - written),
            "publish/stall_time": Sum(ended.stall_seconds),
        }

    def _say_torn(self, token: str, version: int) -> None:
        try:
            self._server.end_update(UpdateEndRequest(token=token, version=version, torn=True))
        except ServerError as error:  # the server's timeout will detect it; the original error matters more
            log.warning("could not report to the server that its weights are torn: %s", error)
