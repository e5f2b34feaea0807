"""Methods that this server adds to vLLM's worker: named in `--worker-extension-cls`, called by `collective_rpc`.

vLLM mixes the class into its worker and fails on a name that is taken: hence the prefix. The class has only methods;
their state is in one object. Arguments are JSON, because vLLM passes text and bytes but not our structs. Results are
plain values. A refusal is returned as `{"refused": reason}`: an exception would count as a fault of the engine.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.platforms import current_platform

from vllm_server.lora_kernels import install
from vllm_server.protocol import ChannelRequest, CudaIpcChannel, NcclChannel
from vllm_server.protocol.nccl import NcclError
from vllm_server.worker import (
    routed_experts,
    sampled_logprobs,
    sampling_parameters,
    seeds,
)
from vllm_server.worker.packed import NotFiniteError
from vllm_server.worker.shared_weights import dtype_name, plain_parameters
from vllm_server.worker.slots import AdapterSlots
from vllm_server.worker.transports import CudaIpcReceiver, FileReader, NcclReceiver, gpu_uuid

if current_platform.is_cuda():
    install.prepare_worker()
    sampling_parameters.copy_when_changed()
    sampled_logprobs.prepare_worker()
elif current_platform.is_cpu():
    seeds.prepare_worker()
routed_experts.prepare_worker()


@dataclass
class PolicyState:
    """A worker's adapters and open channels."""

    slots: AdapterSlots
    files: FileReader
    channels: dict[str, CudaIpcReceiver | NcclReceiver] = field(default_factory=dict)


def settings_of(config: dict[str, Any]) -> str:
    """Return the settings that change how an adapter's tensors are used, as text."""
    return f"r{config['r']} alpha{config['lora_alpha']} rslora{bool(config.get('use_rslora'))}"


class PolicyWorker:
    """Mixed into vLLM's worker."""

    rank: int
    device: torch.device

    def grpo_describe(self) -> dict[str, Any]:
        """Return this worker's `WorkerInfo`."""
        runner = getattr(self, "model_runner", None)
        found: dict[str, Any] = {"rank": self._grpo_rank()}
        if (shape := routed_experts.shape_of(runner)) is not None:
            found["routed_experts"] = msgspec.to_builtins(shape)
        if self.device.type != "cuda":
            return {**found, "gpu_uuid": "", "visible_gpus": []}
        visible = [gpu_uuid(index) for index in range(torch.cuda.device_count())]
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        return {**found, "gpu_uuid": gpu_uuid(index), "visible_gpus": visible}

    def grpo_parameters(self) -> dict[str, dict[str, Any]]:
        """Return shape and dtype of all parameters, each as `ParameterInfo`."""
        found = plain_parameters(self.get_model())  # type: ignore[attr-defined]  # the worker's own
        return {name: {"shape": list(p.shape), "dtype": dtype_name(p)} for name, p in found.items()}

    def grpo_open_channel(self, name: str, request: str) -> dict[str, Any]:
        """Map the trainer's memory, or join its communicator (a `ChannelRequest` as JSON)."""
        state = self._grpo()
        asked = msgspec.json.decode(request, type=ChannelRequest)
        settings = settings_of(asked.adapter_config)
        try:
            with state.slots.writing():
                match asked:
                    case CudaIpcChannel():
                        state.channels[name] = CudaIpcReceiver(asked, settings, self.device)
                    case NcclChannel():
                        state.channels[name] = NcclReceiver(asked, settings, self.device, self._grpo_rank())
        except (ValueError, TypeError, RuntimeError) as error:  # a bad handle, missing memory, no NCCL, …
            return {"refused": str(error)}
        return {}

    def grpo_close_channel(self, name: str) -> None:
        """Close the channel. A channel that is not open needs no closing."""
        state = self._grpo()
        receiver = state.channels.pop(name, None)
        if receiver is not None:
            state.slots.forget_views()
            receiver.close()

    def grpo_install_adapter(self, adapter_id: int, config: str, *, file: str, channel: str) -> dict[str, Any]:
        """Write the adapter of a safetensors file or a channel into a slot.

        Return `Installed` as a dict, with the seconds that this took.
        """
        started = time.perf_counter()
        state = self._grpo()
        settings = msgspec.json.decode(config)
        if channel and channel not in state.channels:
            return {"refused": f"channel {channel} is not open"}
        try:
            with state.slots.writing():
                if channel:
                    adapter = state.channels[channel].receive()
                else:
                    adapter = state.files.read(Path(file), settings_of(settings))
                installed = state.slots.install(adapter_id, adapter, settings)
        except NcclError as error:
            self.grpo_close_channel(channel)
            return {"refused": str(error)}
        except NotFiniteError as error:
            return {"refused": error.got, "field": error.field}
        except (ValueError, RuntimeError) as error:  # vLLM refuses the adapter
            return {"refused": str(error)}
        return {**asdict(installed), "seconds": time.perf_counter() - started}

    def _grpo_rank(self) -> int:
        """Return the rank among the workers of all data parallel replicas; vLLM's own is that within one."""
        parallel = self.parallel_config  # type: ignore[attr-defined]  # the worker's own
        return parallel.data_parallel_index * parallel.world_size + self.rank

    def _grpo(self) -> PolicyState:
        state: PolicyState | None = self.__dict__.get("_grpo_state")
        if state is None:
            manager = self.get_model().lora_manager  # type: ignore[attr-defined]  # the worker's own
            state = self.__dict__["_grpo_state"] = PolicyState(
                AdapterSlots(manager, self.device), FileReader(self.device)
            )
        return state
