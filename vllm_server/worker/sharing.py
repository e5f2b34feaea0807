"""The worker of a server that shares its weights: the policy's worker, plus handles of its parameters.

vLLM imports it before the model is loaded. On a CPU this import keeps the weights plain.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from vllm.platforms import current_platform

from vllm_server.worker.extension import PolicyWorker
from vllm_server.worker.plain_weights import keep_weights_plain
from vllm_server.worker.shared_weights import Exported, Shared, plain_parameters, share

if current_platform.is_cpu():
    keep_weights_plain()


class SharingWorker(PolicyWorker):
    """Mixed into vLLM's worker."""

    def grpo_export_weights(self) -> dict[str, Any]:
        """Share all parameters, once. Return `Exported` as JSON, or the refusal."""
        shared: Shared | None = self.__dict__.get("_grpo_shared")
        try:
            with torch.no_grad():
                shared = shared or share(plain_parameters(self.get_model()), self.device)  # type: ignore[attr-defined]
        except (ValueError, RuntimeError) as error:
            return {"refused": str(error)}
        self.__dict__["_grpo_shared"] = shared
        exported = Exported(handles=shared.handles, device=str(self.device), torch_version=str(torch.__version__))
        return {"exported": msgspec.json.encode(exported)}

    def grpo_synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
