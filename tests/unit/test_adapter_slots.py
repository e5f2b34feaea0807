"""A slot holds exactly the adapter that was installed last, whether copies were repeated or vLLM's own code ran."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from tests.unit.factories import refusing
from vllm_server.protocol.flat import encode_header, lay_out
from vllm_server.worker.channels import AdapterFiles
from vllm_server.worker.extension import PolicyWorker
from vllm_server.worker.packed import NotFiniteError, PackedAdapter, cast, check_finite, layout_of, scaling_of
from vllm_server.worker.slots import AdapterSlots, Installed

SLOTS, MAX_RANK, RANK, WIDTH, SCALING = 2, 4, 2, 6, 3
MODULES = ("k_proj", "q_proj")
CONFIG = {"r": RANK, "lora_alpha": SCALING * RANK, "target_modules": list(MODULES)}
A, B = "base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight"


@pytest.fixture(autouse=True)
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, vLLM would copy tensors into pinned memory, and no copy from there is recorded."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)


def write(slot_2RH: Tensor, a_RH: Tensor | None, b_HR: Tensor | None) -> None:
    """Fill one module's place in a slot as vLLM's layers do: clear it first."""
    slot_2RH.zero_()
    if a_RH is not None and b_HR is not None:
        slot_2RH[0, :RANK].copy_(a_RH)
        slot_2RH[1, :RANK].T.copy_(b_HR)


class Manager:
    """Stands in for vLLM's LoRAModelManager; the adapter `refused` fails after its first module was copied."""

    def __init__(self, refused: int = 0) -> None:
        self.refused = refused
        self.modules = {name: torch.zeros(SLOTS, 2, MAX_RANK, WIDTH) for name in MODULES}
        self.lora_index_to_id: list[int | None] = [None] * SLOTS
        self.lora_config = SimpleNamespace(lora_dtype=torch.float32, max_lora_rank=MAX_RANK)
        self.model, self.vocab_size, self.packed_modules_mapping = None, None, {}
        self._registered_adapters: dict[int, LoRAModel] = {}
        self._active_adapters: dict[int, None] = {}

    def add_adapter(self, lora: LoRAModel) -> None:
        for weights in lora.loras.values():
            weights.optimize()  # scales B in place
        self._registered_adapters[lora.id] = lora

    def activate_adapter(self, adapter_id: int) -> bool:
        slot = self.lora_index_to_id.index(None)
        for name, slots_S2RH in self.modules.items():
            weights = self._registered_adapters[adapter_id].get_lora(name)
            write(slots_S2RH[slot], weights and weights.lora_a, weights and weights.lora_b)
            if adapter_id == self.refused:
                raise MemoryError
        self._active_adapters[adapter_id] = None
        self.lora_index_to_id[slot] = adapter_id
        return True

    def remove_adapter(self, adapter_id: int) -> None:
        del self._registered_adapters[adapter_id], self._active_adapters[adapter_id]
        self.lora_index_to_id[self.lora_index_to_id.index(adapter_id)] = None


def packed(seed: int, *modules: str) -> PackedAdapter:
    shapes = {A: (RANK, WIDTH), B: (WIDTH, RANK)}
    tensors = [(part.format(name), shape) for name in modules for part, shape in shapes.items()]
    layout = layout_of(encode_header(lay_out(tensors, "F32"), {}), "")
    return PackedAdapter(layout, torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed)))


def install(slots: AdapterSlots, adapter_id: int, adapter: PackedAdapter) -> Installed:
    with slots.writing():
        return slots.install(adapter_id, adapter, CONFIG)


def assert_holds(manager: Manager, slot: int, adapter: PackedAdapter) -> None:
    """The adapter's values, B scaled, and zeros everywhere else."""
    tensors = adapter.tensors()
    for name, slots_S2RH in manager.modules.items():
        wanted_2RH, b_HR = torch.zeros(2, MAX_RANK, WIDTH), tensors.get(B.format(name))
        write(wanted_2RH, tensors.get(A.format(name)), None if b_HR is None else SCALING * b_HR)
        assert torch.equal(slots_S2RH[slot], wanted_2RH), name


def test_a_slot_that_vllm_has_half_written_and_refused_is_written_by_vllm_again() -> None:
    """The refused adapter leaves k_proj in the slot, to which an adapter of q_proj alone copies nothing."""
    manager = Manager(refused=9)
    slots = AdapterSlots(manager, torch.device("cpu"))
    kept, adapter = packed(1, "q_proj"), packed(3, "q_proj")
    assert install(slots, 1, kept).slot == 0
    assert install(slots, 2, packed(2, "q_proj")).slot == 1
    manager.remove_adapter(2)

    other = packed(9, *MODULES).tensors()
    manager.add_adapter(LoRAModel.from_lora_tensors(9, other, PEFTHelper.from_dict(CONFIG), device="cpu"))
    with pytest.raises(MemoryError), slots.writing():
        manager.activate_adapter(9)
    assert manager.modules["k_proj"][1].any()
    installed = install(slots, 3, adapter)
    assert (installed.slot, installed.replayed) == (1, False)
    assert_holds(manager, 1, adapter)
    assert_holds(manager, 0, kept)


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("bad", ["nan", "inf", "alpha"])
def test_an_adapter_that_is_not_finite_leaves_the_slots_as_they_were(replayed: bool, bad: str) -> None:
    manager = Manager()
    slots = AdapterSlots(manager, torch.device("cpu"))
    install(slots, 1, kept := packed(1, *MODULES))
    if replayed:
        install(slots, 2, packed(2, *MODULES))
        manager.remove_adapter(2)
    before = {name: slots_S2RH.clone() for name, slots_S2RH in manager.modules.items()}
    spoilt = packed(3, *MODULES)
    config = CONFIG | {"lora_alpha": 1e39} if bad == "alpha" else CONFIG
    if bad != "alpha":
        spoilt.buffer_E[-1] = float(bad)
    with refusing(NotFiniteError, "lora_alpha" if bad == "alpha" else B.format(MODULES[-1])), slots.writing():
        slots.install(3, spoilt, config)
    assert all(torch.equal(before[name], slots_S2RH) for name, slots_S2RH in manager.modules.items())
    assert manager.lora_index_to_id == [1, None] and 3 not in manager._registered_adapters
    good = packed(4, *MODULES)
    assert install(slots, 4, good).replayed is replayed
    assert_holds(manager, 0, kept)
    assert_holds(manager, 1, good)


def test_an_adapter_whose_file_is_gone_is_refused_by_name() -> None:
    """The server has checked it before. An exception would count as a fault of the engine."""
    worker = PolicyWorker()
    slots, files = AdapterSlots(Manager(), torch.device("cpu")), AdapterFiles(torch.device("cpu"))
    vars(worker)["_grpo_state"] = slots, files
    answer = worker.grpo_install_adapter(1, json.dumps(CONFIG), file="/nowhere/at/all", channel="")
    assert "/nowhere/at/all" in answer["refused"] and set(answer) == {"refused"}


# values that are not finite, before or after scaling ------------------------------------------------------------

NAMES = ("q.lora_A.weight", "q.lora_B.weight")


def flat(*values: float, dtype: str = "F32") -> PackedAdapter:
    """Two tensors of two values each."""
    layout = layout_of(encode_header(lay_out([(name, (1, 2)) for name in NAMES], dtype), {}), "")
    return PackedAdapter(layout, torch.tensor(values, dtype=layout.dtype))


def test_what_is_finite_in_32_bits_is_judged_in_the_dtype_of_the_slots() -> None:
    large = flat(1.0, 2.0, 70_000.0, 0.0)  # float16 ends at 65,504
    for dtype in (torch.float32, torch.bfloat16):
        check_finite(cast(large, dtype), 1.0)
    with refusing(NotFiniteError, NAMES[1]):
        check_finite(cast(large, torch.float16), 1.0)
    beyond = flat(3.4e38, 0.0, 0.0, 0.0)  # bfloat16 ends at 3.3895e38
    check_finite(beyond, 1.0)
    with pytest.raises(NotFiniteError):
        check_finite(cast(beyond, torch.bfloat16), 1.0)


@pytest.mark.parametrize(("dtype", "largest", "limit"), [("F16", 1000.0, 65.5), ("F32", 1e30, 3.4e8)])
def test_so_is_what_its_scale_makes_of_it(dtype: str, largest: float, limit: float) -> None:
    """1,000 x 65.5 is 65,500; 1e30 x 3.4e8 is 3.4e38, and float32 ends at 3.4028e38."""
    for sign in (1.0, -1.0):
        check_finite(flat(0.1, 0.1, -largest, 0.0, dtype=dtype), sign * limit)
        with refusing(NotFiniteError, "lora_alpha"):
            check_finite(flat(0.1, 0.1, -largest, 0.0, dtype=dtype), sign * 1.01 * limit)
    for scale in (math.inf, math.nan):
        with pytest.raises(NotFiniteError):
            check_finite(flat(0.0, 0.0, 0.0, 0.0, dtype=dtype), scale)


def test_the_scale_is_alpha_over_the_rank_or_its_root() -> None:
    config = {"r": 16, "lora_alpha": 8}
    assert scaling_of(config) == scaling_of(config | {"use_rslora": None}) == 0.5
    assert scaling_of(config | {"use_rslora": True}) == 2.0
