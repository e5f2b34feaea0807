"""Write adapters into vLLM's slots, the buffers that its kernels read, and keep no other copy.

vLLM keeps each adapter twice: on the CPU, tensor by tensor, and in a slot of device buffers, which hundreds of small
copies fill. Here the slot is the only copy. The first adapter in a slot goes through vLLM's own code, which merges q, k
and v, shards the tensors and scales B. A recorder notes its copies: which piece of the packed buffer went where. Every
later adapter of the same shapes repeats all recorded copies in one call.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from vllm_server.worker.packed import (
    CopyPlan,
    CopyRecorder,
    PackedAdapter,
    cast,
    check_finite,
    owners,
    scaling_of,
    stream_beside,
    writing_on,
)

logger = logging.getLogger("vllm.grpo.slots")


@dataclass(frozen=True)
class Installed:
    """The result of an installation. `unserved`: modules of the adapter for which this worker has no place."""

    slot: int
    replayed: bool
    unserved: tuple[str, ...] = ()


class SlotResident(LoRAModel):
    """An adapter whose tensors are only in its slot.

    vLLM reads an adapter's tensors when it moves the adapter into a slot. This one is in a slot as long as it is
    registered. If vLLM moved it again, there would be no tensors, and the base model would answer under the adapter's
    name. Therefore it raises.
    """

    sealed = False

    def seal(self) -> None:
        self.loras.clear()
        self.sealed = True

    def get_lora(self, module_name: str) -> Any:
        if self.sealed:
            raise RuntimeError(f"adapter {self.id} lost its slot: publish it again")
        return super().get_lora(module_name)


class AdapterSlots:
    """One worker's slots; `manager` is vLLM's LoRAModelManager."""

    def __init__(self, manager: Any, device: torch.device) -> None:
        self._manager = manager
        self._device = device
        self._stream = stream_beside(device)
        self._plans: dict[tuple[int, str], CopyPlan] = {}
        self._activate = manager.activate_adapter
        manager.activate_adapter = self._activate_by_vllm
        manager.remove_oldest_adapter = self._refuse_to_evict

    @property
    def dtype(self) -> torch.dtype:
        return self._manager.lora_config.lora_dtype

    def writing(self) -> AbstractContextManager[None]:
        """Return the context in which slots are written, beside the forward passes."""
        return writing_on(self._stream)

    def install(self, adapter_id: int, adapter: PackedAdapter, config: dict[str, Any]) -> Installed:
        """Write an adapter into a free slot and register it under its id. Call within `writing`.

        Raises:
            RuntimeError: no slot is free.
            ValueError: vLLM refuses the adapter, it is of another model, or it is not finite (`NotFiniteError`: nothing
                was written).
        """
        adapter = cast(adapter, self.dtype)
        check_finite(adapter, scaling_of(config))
        key = adapter.layout.key
        free = [slot for slot, holder in enumerate(self._manager.lora_index_to_id) if holder is None]
        if not free:
            raise RuntimeError(f"all {len(self._manager.lora_index_to_id)} adapter slots are taken")
        # Recorded copies write only what this layout covers; `_activate_by_vllm` has dropped those of earlier layouts.
        known = [slot for slot in free if (slot, key) in self._plans]
        if known:
            slot, unserved = known[0], ()
            self._plans[slot, key].run(adapter.buffer_E, lasting=adapter.lasting)
            resident = SlotResident(adapter_id, config["r"], {})
            resident.seal()
            self._manager._registered_adapters[adapter_id] = resident
            self._manager._active_adapters[adapter_id] = None
            self._manager.lora_index_to_id[slot] = adapter_id
        else:
            slot, unserved = self._install_by_vllm(adapter_id, adapter, config)
        return Installed(slot, bool(known), unserved)

    def _install_by_vllm(
        self, adapter_id: int, adapter: PackedAdapter, config: dict[str, Any]
    ) -> tuple[int, tuple[str, ...]]:
        """Install by vLLM's own code and record its copies. Return the slot and the modules that have no place."""
        manager = self._manager
        helper = PEFTHelper.from_dict({**config, "vllm_max_position_embeddings": None})
        helper.validate_legal(manager.lora_config)
        buffer_E = adapter.buffer_E.clone()  # vLLM scales B in place
        # vLLM's renaming of checkpoint names, without its merging of q, k, v and of gate, up.
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        lora = SlotResident.from_lora_tensors(
            adapter_id,
            adapter.tensors(buffer_E),
            helper,
            device=str(buffer_E.device),
            dtype=self.dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
            skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
        )
        assert isinstance(lora, SlotResident)
        _check_sizes(manager, lora)
        manager.add_adapter(lora)  # merges the modules that vLLM's layers merge
        unserved = tuple(sorted(set(lora.loras) - set(manager.modules)))
        with CopyRecorder(buffer_E) as recorder:
            manager.activate_adapter(adapter_id)
        lora.seal()
        slot = manager.lora_index_to_id.index(adapter_id)
        targets, sources = [target for target, _ in recorder.copies], [source for _, source in recorder.copies]
        if (names := owners(recorder.copies, adapter.layout)) is None:
            logger.info("vLLM's own code loads each adapter of this model: not all of its copies can be repeated")
        else:
            pairs = zip(targets, names, strict=True)
            scaled = [target for target, name in pairs if ".lora_B" in name or "lora_embedding_B" in name]
            plan = CopyPlan(targets, sources, scaled, helper.vllm_lora_scaling_factor)
            self._plans[slot, adapter.layout.key] = plan
        return slot, unserved

    def _activate_by_vllm(self, adapter_id: int) -> bool:
        """Activate an adapter by vLLM's own code, and drop the slot's recorded copies.

        vLLM clears the slot first. Repeated copies do not clear it, and need not while they follow copies to the same
        places. After vLLM has written the slot, even partly, they may no longer be used for it.
        """
        manager = self._manager
        if adapter_id not in manager._active_adapters:
            if None not in manager.lora_index_to_id:
                self._refuse_to_evict()
            slot = manager.lora_index_to_id.index(None)  # vLLM also takes the first free slot
            for key in [key for key in self._plans if key[0] == slot]:  # copies of one layout, the slot's current one
                del self._plans[key]
        return self._activate(adapter_id)

    def _refuse_to_evict(self) -> bool:
        """Raise instead of evicting: adapters of vLLM's routes would evict a version that exists nowhere else."""
        slots = len(self._manager.lora_index_to_id)
        raise RuntimeError(f"all {slots} adapter slots are taken; raise --max-loras to load adapters of your own")

    def forget_views(self) -> None:
        """Drop all cached views, so that received buffers can be freed."""
        for plan in self._plans.values():
            plan.forget_views()


def _check_sizes(manager: Any, lora: LoRAModel) -> None:
    """Raise a ValueError for an adapter of another model, before its modules are merged.

    vLLM would copy a tensor that is too small into a part of its place.
    """
    for name, weights in lora.loras.items():
        parent, _, part = name.rpartition(".")
        merged, parts = next((m for m in manager.packed_modules_mapping.items() if part in m[1]), (part, [part]))
        base = getattr(manager.modules.get(f"{parent}.{merged}" if parent else merged), "base_layer", None)
        outputs = _outputs(base, len(parts))
        for what, got, wanted in (
            ("takes inputs", weights.lora_a.shape[-1], getattr(base, "input_size", None)),
            ("gives outputs", weights.lora_b.shape[0], outputs[parts.index(part)] if outputs else None),
        ):
            if isinstance(wanted, int) and got != wanted:
                verb, noun = what.split()
                raise ValueError(f"{name} {verb} {got} {noun}, this model's {wanted}: the adapter is another model's")


def _outputs(base: Any, parts: int) -> list[Any] | None:
    """Return the rows of B for each part of a (merged) linear layer, over all shards; None for other layers."""
    if hasattr(base, "total_num_kv_heads"):  # `output_sizes` counts replicated kv heads on several GPUs
        heads = (base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads)
        return [count * base.head_size for count in heads] if parts == 3 else None
    sizes = list(getattr(base, "output_sizes", None) or [getattr(base, "output_size", None)])
    return sizes if len(sizes) == parts else None
