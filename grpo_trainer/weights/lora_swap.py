"""LoRA hot swap: each version is an adapter under a name that is never used again, loaded beside the running server.

The adapter goes over as a PEFT checkpoint in a folder that both sides see. The base model is never written. Requests in
flight finish on the version that they began with; the server keeps the newest few and lets older ones go.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from peft import PeftModel

from grpo_trainer.config import LoraOnly
from grpo_trainer.errors import BridgeError
from grpo_trainer.files import whole_folder
from grpo_trainer.metrics.types import Sum
from grpo_trainer.model.lora import save_adapter
from grpo_trainer.server_client import ServerClient
from grpo_trainer.weights.bridge import Published
from grpo_trainer.weights.proof import prove_lora
from vllm_server.protocol import BridgeInfo, version_name

log = logging.getLogger(__name__)


class LoraSwap:
    """The `lora_only` bridge.

    Args:
        root: adapters are written here; the server was started with it as --lora-root.
        seq_len: longest sequence of the training, which the server must be able to serve.
    """

    def __init__(self, config: LoraOnly, model: PeftModel, server: ServerClient, root: Path, seq_len: int) -> None:
        self._config = config
        self._model = model
        self._server = server
        self._root = root
        self._seq_len = seq_len
        self._folders: deque[Path] = deque()
        self._info: BridgeInfo | None = None

    def __enter__(self) -> LoraSwap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    def connect(self, policy_version: int) -> int:
        info = self._info = self._server.wait_until_ready()
        self._check(info)
        status = self._server.lora_status()
        if status.load_count:  # a server that outlived an earlier trainer: its names are used up
            seen = max([status.policy_version, *(version.version for version in status.versions)])
            policy_version = max(policy_version, seen + 1)
            log.info("the server has served version %d before; going on with %d", seen, policy_version)
        log.info(
            "bridge lora_only: server %s, vLLM %s on %s, %s, boot %s",
            info.served_model_name, info.vllm_version, info.device, info.dtype, info.boot_id,
        )  # fmt: skip
        return policy_version

    def _check(self, info: BridgeInfo) -> None:
        """Refuse before training what would fail, or lie, during it."""
        problems = []
        if info.max_lora_rank is None:
            problems.append(f"was started without LoRA: start it with --max-lora-rank {self._config.r}")
        elif info.max_lora_rank < self._config.r:
            problems.append(
                f"takes adapters up to rank {info.max_lora_rank}, --lora-r is {self._config.r}: start it with "
                f"--max-lora-rank {self._config.r}"
            )
        if info.lora_name != self._config.name:
            problems.append(f"routes {info.lora_name}-vN, --lora-name is {self._config.name}: make them the same")
        if info.max_model_len < self._seq_len:
            log.warning("the server serves at most %d tokens, --seq-len is %d", info.max_model_len, self._seq_len)
        if info.logprobs_mode != "processed_logprobs":
            problems.append(
                f"returns {info.logprobs_mode}, not the logprobs that it samples from: start it with "
                "--logprobs-mode processed_logprobs"
            )
        if problems:
            raise BridgeError("the inference server " + "; and ".join(problems))

    def prove(self) -> None:
        if not self._config.proof:
            log.warning("bridge proof skipped (--no-proof): nothing shows that the server uses what is published")
            return
        assert self._info is not None, "connect comes first"
        version = self._info.policy_version
        prove_lora(self._model, self._server, lambda name: self._load(name, version, activate=False), self._info)

    def updating(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # the server holds a copy of its own: nothing to fence

    def publish(self, version: int) -> Published:
        name = version_name(self._config.name, version)
        started = time.perf_counter()
        saved = self._load(name, version, activate=True)
        seconds = time.perf_counter() - started
        self._forget_old_folders()
        metrics = {
            "train/sync_time": Sum(seconds),
            "publish/save_time": Sum(saved),
            "publish/load_time": Sum(seconds - saved),
            "publish/version": Sum(version),
        }
        return Published(version, name, metrics)

    def _load(self, name: str, version: int, *, activate: bool) -> float:
        """Write the adapter, have it loaded, check what the server says it did; returns the seconds of writing."""
        path = self._root / name
        started = time.perf_counter()
        with whole_folder(path) as folder:
            save_adapter(self._model, folder)
        saved = time.perf_counter() - started
        self._folders.append(path)
        answer = self._server.load_adapter(path, name, version, activate=activate)
        if (answer.adapter_name, answer.policy_version) != (name, version):
            raise BridgeError(
                f"published {name} as version {version}, but the server serves {answer.adapter_name} as version "
                f"{answer.policy_version}; is another trainer publishing to it?"
            )
        return saved

    def _forget_old_folders(self) -> None:
        """Delete files of versions that the server has let go; they outlive their version by one."""
        while len(self._folders) > self._config.keep_versions + 1:
            folder = self._folders.popleft()
            try:
                shutil.rmtree(folder)
            except OSError as error:  # best effort: what stays costs disk space, nothing else
                log.warning("could not delete %s: %s", folder, error)
