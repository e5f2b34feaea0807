"""The server's fence, from the trainer's side: within it the server computes nothing and its weights may be written."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.metrics.types import Metric, Sum
from grpo_trainer.server_client import ServerClient
from vllm_server.protocol import InFlight, UpdateBeginRequest, UpdateEndRequest

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class ServerFence:
    """One server's fence."""

    server: ServerClient
    in_flight: InFlight
    """What happens to requests in flight."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Of the last update; empty once it was published."""
    _token: str = ""
    _pause_seconds: float = 0.0
    _started: float = 0.0
    _begun: float = 0.0

    @contextmanager
    def hold(self, boot_id: str, version: int, seconds: float) -> Iterator[str]:
        """Keep the server from reading its weights within the block; afterwards it generates with them as `version`.

        `boot_id` is that of the server that is meant: another one at its address refuses. If the block fails, the
        server learns that its weights are torn, and refuses to generate until the next update. After the time limit of
        `seconds`, too, they count as torn. The block gets the update's token.

        Raises:
            BridgeError: the server confirms another version.
        """
        token = self.begin(boot_id, seconds)
        try:
            yield token
        except BaseException:
            self.give_up()
            raise
        self.end(version)

    def begin(self, boot_id: str, seconds: float) -> str:
        """Pause the server, and return the update's token; see `hold`."""
        self._started = time.perf_counter()
        asked = UpdateBeginRequest(boot_id=boot_id, in_flight=self.in_flight, timeout_s=seconds)
        begun = self.server.begin_update(asked)
        self._token, self._pause_seconds, self._begun = begun.token, begun.pause_seconds, time.perf_counter()
        return begun.token

    def end(self, version: int) -> None:
        """Resume the server on the weights that were written; see `hold`."""
        written = time.perf_counter()
        ended = self.server.end_update(UpdateEndRequest(token=self._token, version=version))
        self._token = ""
        finished = time.perf_counter()
        if ended.policy_version != version:
            raise BridgeError(
                "the server confirms another version than the one written",
                field="version",
                got=ended.policy_version,
                wanted=str(version),
            )
        self.metrics = {
            "train/sync_time": Sum(finished - self._started),
            "publish/pause_time": Sum(self._pause_seconds),
            "publish/write_time": Sum(written - self._begun),
            "publish/end_time": Sum(finished - written),
            "publish/stall_time": Sum(ended.stall_seconds),
        }

    def give_up(self, version: int | None = None) -> None:
        """If the server is paused, tell it that its weights are still those of `version`; None: that they are torn."""
        if not self._token:
            return
        token, self._token = self._token, ""
        try:
            self.server.end_update(UpdateEndRequest(token=token, version=version or 0, torn=version is None))
        except ServerError as error:  # the server's timeout will detect it; the original error matters more
            log.warning("could not report to the server that an update has failed: %s", error)
