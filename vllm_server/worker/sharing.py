"""The worker of a server whose weights change while it runs: a trainer shares its memory, or sends it all weights.

vLLM imports it before the model is loaded. On a CPU this import keeps the weights plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import Any

import msgspec
import torch
from vllm.platforms import current_platform

from vllm_server.protocol import WeightsOpenRequest
from vllm_server.protocol.bridge_config import Handle
from vllm_server.worker.extension import PolicyWorker
from vllm_server.worker.shared_weights import Exported, checksum, keep_weights_plain, plain_parameters, share
from vllm_server.worker.weights import WeightChannel

if current_platform.is_cpu():
    keep_weights_plain()


REFUSALS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError)
"""What becomes of a damaged layout, a missing partner, a file that can't be read, a tensor that vLLM refuses."""


def _refusing(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Have a method return why the trainer's request can't be carried out, instead of raising it."""

    @wraps(method)
    def call(*args: Any) -> dict[str, Any]:
        try:
            return method(*args)
        except REFUSALS as error:
            return {"refused": f"{type(error).__name__}: {error}"}

    return call


class SharingWorker(PolicyWorker):
    """Mixed into vLLM's worker."""

    def grpo_export_weights(self) -> dict[str, Any]:
        """Share all parameters, once. Return `Exported` as JSON, or the refusal."""
        handles: dict[str, Handle] | None = self.__dict__.get("_grpo_shared")
        try:
            with torch.no_grad():
                handles = handles or share(plain_parameters(self.get_model()), self.device)  # type: ignore[attr-defined]
        except (ValueError, RuntimeError) as error:
            return {"refused": str(error)}
        self.__dict__["_grpo_shared"] = handles
        device, version = str(self.device), str(torch.__version__)
        exported = Exported(rank=self.rank, handles=handles, device=device, torch_version=version)
        return {"exported": msgspec.json.encode(exported)}

    def grpo_synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def grpo_checksums(self) -> dict[str, int]:
        """Return the `checksum` of each parameter, by vLLM's name."""
        found = plain_parameters(self.get_model())  # type: ignore[attr-defined]
        return {name: checksum(parameter) for name, parameter in found.items()}

    @_refusing
    def grpo_weights_open(self, name: str, request: str) -> dict[str, Any]:
        """Open the channel for weights (a `WeightsOpenRequest` as JSON); return the bytes set aside for staging."""
        asked = msgspec.json.decode(request, type=WeightsOpenRequest)
        model = self.get_model()  # type: ignore[attr-defined]  # the worker's own
        shards = self.parallel_config.tensor_parallel_size  # type: ignore[attr-defined]  # likewise
        channel = WeightChannel(asked, model, self.device, self.rank, shards)
        self.__dict__["_grpo_weights"] = name, channel
        return {"staging_bytes": channel.staging_bytes}

    @_refusing
    def grpo_weights_stage(self, name: str, version: int) -> dict[str, Any]:
        """Begin to receive a version in a thread."""
        self._grpo_channel(name).begin_staging(version)
        return {}

    @_refusing
    def grpo_weights_staged(self, name: str) -> dict[str, Any]:
        """Return whether the version has arrived."""
        return {"staged": self._grpo_channel(name).has_staged()}

    @_refusing
    def grpo_weights_apply(self, name: str, version: int) -> dict[str, Any]:
        """Write a version into the parameters; return `Written` as a dict."""
        return asdict(self._grpo_channel(name).apply(version))

    def grpo_weights_close(self, name: str) -> None:
        """Free the channel's memory. A channel that is not open needs no closing."""
        known, channel = self.__dict__.get("_grpo_weights", ("", None))
        if channel is not None and known == name:
            del self.__dict__["_grpo_weights"]
            channel.close()

    def _grpo_channel(self, name: str) -> WeightChannel:
        known, channel = self.__dict__.get("_grpo_weights", ("", None))
        if channel is None or known != name:
            raise ValueError(f"channel {name} is not open")
        return channel
