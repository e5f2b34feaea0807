"""Shared weights: the trainer's parameters are the server's, and the optimizer writes them where the server reads them.

Nothing is sent. A write happens within a fence: the server finishes its current forward pass and pauses. It drops what
it computed from the old weights and resumes as the next version. If a write fails midway, the weights are torn. The
trainer reports that to the server; if the trainer has died, the server detects it by a timeout. Then the server refuses
to generate until another write is complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from grpo_trainer.alignment.proof import Proof, Proved, WeightChange
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.errors import BridgeError
from grpo_trainer.metrics.types import Metric
from grpo_trainer.policy import SharedWeights
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.bridge import Published, WeightBridge, problems_of, quiet
from grpo_trainer.weights.fence import ServerFence
from vllm_server.protocol import BridgeInfo

log = logging.getLogger(__name__)

WRITE_SECONDS = 60.0
RESTORE_SECONDS = 600.0
"""Time limits of a fence, after which the weights count as torn. A restored checkpoint first crosses the PCIe bus."""


class SharedBridge(WeightBridge):
    """The `shared_vllm` bridge.

    Args:
        policy: the policy whose model lies in the memory of `server`.
        seq_len: longest sequence of the training, which the server must be able to serve.
        all_written: called within a fence once this process has written; returns when all processes have.

    Attributes:
        proved: result of the proof; None: no proof ran.
    """

    def __init__(
        self,
        config: BridgeConfig,
        policy: SharedWeights,
        server: ServerClient,
        seq_len: int,
        all_written: Callable[[], object] = lambda: None,
    ) -> None:
        self._config = config
        self._policy = policy
        self._server = server
        self._seq_len = seq_len
        self._device = policy.model.device
        self._info: BridgeInfo | None = None
        self._version = 0
        self._all_written = all_written
        self._server_fence = ServerFence(server, config.in_flight, self._settle)
        self.proved: Proved | None = None

    def close(self) -> None:
        self._server.close()

    def connect(self, policy_version: int) -> int:
        """Connect to the server, and write a resumed checkpoint into the server's memory.

        Raises:
            BridgeError: the model was attached to another server, or the server's weights are torn or synthetic.
        """
        version = self.look(policy_version)
        self.begin(version)
        return version

    def look(self, policy_version: int) -> int:
        """Wait for the server, check it, and return the version to begin with: `policy_version` or a higher one.

        Raises:
            BridgeError: as `connect`.
        """
        self._server.wait_until_there()
        state = self._server.wait_until_settled()
        info = self._info = state.info
        self._check(info)
        log.info(
            "bridge shared_vllm: server %s, vLLM %s on %s, %s, boot %s",
            *(info.served_model_name, info.vllm_version, info.device, info.dtype, info.boot_id),
        )
        if self._policy.loaded is not None:
            return policy_version if policy_version > info.policy_version else info.policy_version + 1
        fault = state.fault
        if fault is None and info.policy_version < 0:
            fault = "an earlier trainer ended while it was proving the bridge, and left a synthetic change"
        if fault is not None:
            raise BridgeError(
                "holds no policy's weights",
                field="the inference server",
                got=fault,
                fix="write a checkpoint's weights into it with --resume auto, or restart the server",
            )
        if info.update_count:
            log.warning(
                "an earlier trainer has written the server's weights: training continues from its version %d, not from "
                "the model's files",
                info.policy_version,
            )
        return max(policy_version, info.policy_version)

    def begin(self, version: int) -> None:
        """Begin with a version, and write a resumed checkpoint into the server's memory as that version."""
        if self._policy.loaded is not None:
            with self._fence(version, RESTORE_SECONDS):
                self._policy.write_loaded()
            log.info("wrote the checkpoint's weights into the server's memory, as version %d", version)
        self._version = version

    def _check(self, info: BridgeInfo) -> None:
        """Raise a `BridgeError` for settings of the server that training would fail on or learn wrongly from."""
        attached = self._policy.source.boot_id
        if info.boot_id != attached:
            raise BridgeError(
                "the inference server was restarted after its weights were attached",
                field="boot_id",
                got=info.boot_id,
                wanted=attached,
                fix="start the trainer again",
            )
        if problems := problems_of(info, self._seq_len, model=self._policy.model):
            raise BridgeError.of(problems)

    def prove(self) -> float | None:
        if not self._config.proof:
            log.warning("bridge proof skipped (--no-proof): nothing shows that the server uses what is written")
            return None
        assert self._info is not None, "connect comes first"
        model = self._policy.model
        change = WeightChange(model, self._version, self._fence)
        self.proved = Proof(model, self._server).prove(self._info, change)
        return self.proved.noise

    def updating(self) -> AbstractContextManager[None]:
        return self._fence(self._version + 1, WRITE_SECONDS)

    def publish(self, version: int) -> Published:
        """Return the version that the last fence has published: the optimizer's write was the whole update."""
        assert self._info is not None, "connect comes first"
        if version != self._version:
            raise BridgeError(
                "the shared weights are of another version", field="version", got=version, wanted=str(self._version)
            )
        metrics, self._server_fence.metrics = self.last_metrics, {}
        return Published(version, self._info.served_model_name, quiet(version) | metrics)

    @property
    def last_metrics(self) -> dict[str, Metric]:
        """The figures of the last update; empty once it was published."""
        return self._server_fence.metrics

    @contextmanager
    def _fence(self, version: int, seconds: float = WRITE_SECONDS) -> Iterator[None]:
        """Keep the server from reading the weights within the block; afterwards it generates with them as `version`."""
        assert self._info is not None, "connect comes first"
        self.finish_kernels()  # so that the server does not pause for kernels queued earlier
        with self._server_fence.hold(self._info.boot_id, version, seconds):
            yield
        self._version = version

    def _settle(self) -> None:
        self.finish_kernels()
        self._all_written()

    def finish_kernels(self) -> None:
        """Wait until the trainer's device has done what was asked of it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
