"""Methods that this server adds to vLLM's worker: named in `--worker-extension-cls`, called by `collective_rpc`.

vLLM mixes the class into its worker and fails on a name that is taken: hence the prefix. The class has only methods;
their state is in one object. Arguments are JSON, because vLLM passes text and bytes but not our structs. Results are
plain values. A refusal is returned as `{"refused": reason}`: an exception would count as a fault of the engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from vllm_server.forking import GUARDED_VARIABLE
from vllm_server.protocol.bridge_config import Exported, Handle
from vllm_server.protocol.channels import ChannelRequest
from vllm_server.protocol.group import GroupError
from vllm_server.worker import routed_experts
from vllm_server.worker.channels import AdapterChannel, AdapterFiles, gpu_uuid, settings_of
from vllm_server.worker.packed import NotFiniteError
from vllm_server.worker.shared_weights import checksum, dtype_name, plain_parameters, share
from vllm_server.worker.slots import AdapterSlots
from vllm_server.worker.weights import WeightChannel

C = TypeVar("C", AdapterChannel, WeightChannel)


REFUSALS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, OSError)
"""What becomes of a damaged layout, a number that is too large, a missing partner, a file that can't be read, a tensor
that vLLM refuses."""


def _refusing(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Have a method return why the trainer's request can't be carried out, instead of raising it."""

    @wraps(method)
    def call(*args: Any) -> dict[str, Any]:
        try:
            return method(*args)
        except REFUSALS as error:
            return {"refused": f"{type(error).__name__}: {error}"}

    return call


class PolicyWorker:
    """Mixed into vLLM's worker."""

    rank: int
    device: torch.device

    def grpo_describe(self) -> dict[str, Any]:
        """Return this worker's `WorkerInfo`, and whether its engine ends with the server."""
        runner = getattr(self, "model_runner", None)
        found: dict[str, Any] = {"rank": self._grpo_rank(), "guarded": GUARDED_VARIABLE in os.environ}
        if (shape := routed_experts.shape_of(runner)) is not None:
            found["routed_experts"] = msgspec.to_builtins(shape)
        if self.device.type != "cuda":
            # All workers have mapped the files of their collectives, which would stay: vLLM kills workers at the end.
            for path in Path("/dev/shm").glob(f"{os.environ.get('VLLM_DIST_IDENT', 'no')}-*-cpushm*"):
                path.unlink(missing_ok=True)
            return {**found, "gpu_uuid": "", "visible_gpus": []}
        visible = [gpu_uuid(index) for index in range(torch.cuda.device_count())]
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        return {**found, "gpu_uuid": gpu_uuid(index), "visible_gpus": visible}

    def grpo_parameters(self) -> dict[str, dict[str, Any]]:
        """Return shape and dtype of all parameters, each as `ParameterInfo`."""
        found = plain_parameters(self.get_model())  # type: ignore[attr-defined]  # the worker's own
        return {name: {"shape": list(p.shape), "dtype": dtype_name(p)} for name, p in found.items()}

    @_refusing
    def grpo_open_channel(self, name: str, request: str) -> dict[str, Any]:
        """Open this worker's end of a channel (a `ChannelRequest` as JSON); return the bytes set aside for staging."""
        asked = msgspec.json.decode(request, type=ChannelRequest)
        if asked.adapter_config is not None:
            with self._grpo_adapters()[0].writing():
                channel = AdapterChannel(asked, self.device, self._grpo_rank())
        else:
            model = self.get_model()  # type: ignore[attr-defined]  # the worker's own
            shards = self.parallel_config.tensor_parallel_size  # type: ignore[attr-defined]  # likewise
            channel = WeightChannel(asked, model, self.device, self._grpo_rank(), shards)
        self.__dict__["_grpo_open"] = name, channel
        return {"staging_bytes": channel.staging_bytes}

    def grpo_close_channel(self, name: str) -> None:
        """Free the channel's memory, or leave its group. A channel that is not open needs no closing."""
        known, channel = self.__dict__.get("_grpo_open", ("", None))
        if channel is None or known != name:
            return
        del self.__dict__["_grpo_open"]
        if isinstance(channel, AdapterChannel):
            self._grpo_adapters()[0].forget_views()
        channel.close()

    def _grpo_channel(self, name: str, kind: type[C]) -> C:
        known, channel = self.__dict__.get("_grpo_open", ("", None))
        if known != name or not isinstance(channel, kind):
            raise ValueError(f"channel {name} is not open")
        return channel

    def grpo_install_adapter(self, adapter_id: int, config: str, *, file: str, channel: str) -> dict[str, Any]:
        """Write the adapter of a safetensors file or a channel into a slot; return `Installed` and seconds."""
        started = time.perf_counter()
        slots, files = self._grpo_adapters()
        settings = msgspec.json.decode(config)
        try:
            with slots.writing():
                if channel:
                    adapter = self._grpo_channel(channel, AdapterChannel).receive()
                else:
                    adapter = files.read(Path(file), settings_of(settings))
                installed = slots.install(adapter_id, adapter, settings)
        except GroupError as error:
            self.grpo_close_channel(channel)
            return {"refused": str(error)}
        except NotFiniteError as error:
            return {"refused": error.got, "field": error.field}
        except REFUSALS as error:  # vLLM refuses the adapter, or its file is gone
            return {"refused": str(error)}
        return {**asdict(installed), "seconds": time.perf_counter() - started}

    def _grpo_rank(self) -> int:
        """Return the rank among the workers of all data parallel replicas; vLLM's own is that within one."""
        parallel = self.parallel_config  # type: ignore[attr-defined]  # the worker's own
        return parallel.data_parallel_index * parallel.world_size + self.rank

    def _grpo_adapters(self) -> tuple[AdapterSlots, AdapterFiles]:
        if "_grpo_state" not in self.__dict__:
            manager = self.get_model().lora_manager  # type: ignore[attr-defined]  # the worker's own
            self.__dict__["_grpo_state"] = AdapterSlots(manager, self.device), AdapterFiles(self.device)
        return self.__dict__["_grpo_state"]


# ----------------------------------------------------------------------------------------------------------------------
# A server whose weights change while it runs: a trainer shares its memory, or sends it all weights.


class SharingWorker(PolicyWorker):
    """Mixed into the worker of such a server."""

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
    def grpo_weights_stage(self, name: str, version: int) -> dict[str, Any]:
        """Begin to receive a version in a thread."""
        self._grpo_channel(name, WeightChannel).begin_staging(version)
        return {}

    @_refusing
    def grpo_weights_staged(self, name: str) -> dict[str, Any]:
        """Return whether the version has arrived."""
        return {"staged": self._grpo_channel(name, WeightChannel).has_staged()}

    @_refusing
    def grpo_weights_apply(self, name: str, version: int) -> dict[str, Any]:
        """Write a version into the parameters; return `WeightsDone` as a dict."""
        return msgspec.to_builtins(self._grpo_channel(name, WeightChannel).apply(version))
