"""Reading `vllm_bridge_config.json`, and each reason to refuse one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from grpo_trainer.errors import BridgeError
from grpo_trainer.shared import bridge_file
from grpo_trainer.shared.bridge_file import (
    check_gpu,
    read_bridge_config,
    tied_names,
)
from tests.golden.stand_in import bridge_config, write_config, write_tensors
from vllm_server.protocol.bridge_config import FILE_NAME, BridgeConfigFile, CudaIpcHandle, FileHandle, RankWeights


@pytest.fixture
def config(tmp_path: Path) -> BridgeConfigFile:
    """A file that is in order: two parameters, one of them under two names."""
    weight = torch.zeros(4, 8)
    tensors = {"embed.weight": weight, "norm.weight": torch.zeros(8), "head.weight": weight}
    return bridge_config("some/model", write_tensors(tmp_path / "memory", tensors))


def changed(config: BridgeConfigFile, **fields: Any) -> BridgeConfigFile:
    return msgspec.structs.replace(config, **fields)


def refused(path: Path, field: str = "", got: str = "", *, wanted: str = "", fix: str = "") -> None:
    """That the file is refused for this field, with these in what came, in what was wanted and in the fix."""
    with pytest.raises(BridgeError) as caught:
        read_bridge_config(path)
    assert caught.value.field == (f"{path}: {field}" if field else str(path))
    for part, word in ((caught.value.got, got), (caught.value.wanted, wanted), (caught.value.fix, fix)):
        assert word in part


# reading ---------------------------------------------------------------------------------------------------


def test_a_named_file_or_its_folder(tmp_path: Path, config: BridgeConfigFile) -> None:
    path = write_config(tmp_path, config)
    assert read_bridge_config(path) == read_bridge_config(tmp_path) == config


def test_a_named_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BridgeError) as caught:
        read_bridge_config(tmp_path / "nowhere.json")
    assert caught.value.field == f"--vllm-config-path {tmp_path / 'nowhere.json'}"
    assert caught.value.got == os.strerror(errno.ENOENT)


# refusing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622])
def test_a_file_that_others_may_read_or_write(tmp_path: Path, config: BridgeConfigFile, mode: int) -> None:
    path = write_config(tmp_path, config)
    path.chmod(mode)
    refused(path, "mode", f"{mode:04o}", wanted="0600", fix="chmod")


def test_a_file_of_somebody_else(tmp_path: Path, config: BridgeConfigFile, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path, config)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused(path, "owner", f"uid {os.getuid()}", wanted=str(os.getuid() + 1))


def test_a_dead_server(tmp_path: Path, config: BridgeConfigFile) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    refused(write_config(tmp_path, changed(config, server_pid=done.pid)), "server_pid", str(done.pid))


def test_a_process_that_only_got_the_dead_servers_number(tmp_path: Path, config: BridgeConfigFile) -> None:
    path = write_config(tmp_path, config)
    os.utime(path, (1e9, 1e9))  # written in 2001, before this process was
    refused(path, "server_pid", str(os.getpid()))


def test_another_boot_of_the_machine(tmp_path: Path, config: BridgeConfigFile) -> None:
    refused(write_config(tmp_path, changed(config, machine="before")), "machine", "before", wanted=config.machine)


def test_another_release(tmp_path: Path, config: BridgeConfigFile) -> None:
    """Recognised by its number even where its fields are unknown."""
    path = write_config(tmp_path, config)
    path.write_text('{"schema_version": 2, "weights": []}')
    refused(path, "schema_version", "2", wanted="1", fix="install")


@pytest.mark.parametrize("field", ["tp_degree", "dp_shard_degree"])
def test_several_workers(tmp_path: Path, config: BridgeConfigFile, field: str) -> None:
    refused(write_config(tmp_path, changed(config, **{field: 4})), field, "4", wanted="1")


# several workers -------------------------------------------------------------------------------------------


def of_two(tmp_path: Path, config: BridgeConfigFile) -> BridgeConfigFile:
    """The file of a server with a second worker."""
    memory = write_tensors(tmp_path / "second", {name: torch.ones(2) for name in config.param_names})
    shapes = {name: msgspec.structs.replace(config.param_mappings[name], shape=memory[name].shape) for name in memory}
    other = RankWeights(rank=1, param_mappings=shapes, ipc_handles=memory, gpu_uuid="")
    return changed(config, tp_degree=2, further_ranks=[other])


def test_each_rank_gets_its_workers_weights(tmp_path: Path, config: BridgeConfigFile) -> None:
    both = of_two(tmp_path, config)
    path = write_config(tmp_path, both)
    assert read_bridge_config(path, 0, 2).ipc_handles == config.ipc_handles
    assert read_bridge_config(path, 1, 2).ipc_handles == both.further_ranks[0].ipc_handles
    refused(path, "tp_degree", "2", wanted="1", fix="--server.tensor-parallel-size 2")
    with pytest.raises(BridgeError) as caught:
        read_bridge_config(write_config(tmp_path, config), 1, 2)
    assert caught.value.field.endswith("tp_degree") and caught.value.got == "1"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 1}', '{"schema_version": "one"}', "\x00\xff"])
def test_damaged_json(tmp_path: Path, config: BridgeConfigFile, content: str) -> None:
    path = write_config(tmp_path, config)
    path.write_bytes(content.encode("latin-1"))
    refused(path, fix="start")


def test_cut_short_anywhere(tmp_path: Path, config: BridgeConfigFile) -> None:
    path = write_config(tmp_path, config)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        refused(path, fix="start")


def test_no_file_at_all(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(BridgeError) as caught:
        read_bridge_config(tmp_path)
    assert caught.value.got == os.strerror(errno.EISDIR)


def test_a_server_that_shares_nothing(tmp_path: Path, config: BridgeConfigFile) -> None:
    path = write_config(tmp_path, changed(config, shared_weights_enabled=False))
    refused(path, "shared_weights_enabled", "false", fix="--shared-weights")


CUDA = CudaIpcHandle(
    device_index=0,
    ipc_handle_b64="aGFuZGxl",
    storage_size=32,
    storage_offset=0,
    ref_counter_handle_b64="",
    ref_counter_offset=0,
    event_handle_b64="",
    event_sync_required=False,
    shape=[8],
    dtype="float32",
    stride=[1],
    tensor_offset=0,
)


def test_parameters_that_overlap(tmp_path: Path, config: BridgeConfigFile) -> None:
    """embed.weight is 4 * 8 * 4 = 128 bytes from 0."""
    moved = msgspec.structs.replace(config.ipc_handles["norm.weight"], offset=124)
    handles = dict(config.ipc_handles) | {"norm.weight": moved}
    refused(write_config(tmp_path, changed(config, ipc_handles=handles)), "embed.weight and norm.weight")


def test_quantised_weights(tmp_path: Path, config: BridgeConfigFile) -> None:
    mappings = {name: msgspec.structs.replace(entry, dtype="int8") for name, entry in config.param_mappings.items()}
    handles = {name: msgspec.structs.replace(entry, dtype="int8") for name, entry in config.ipc_handles.items()}
    path = write_config(tmp_path, changed(config, param_mappings=mappings, ipc_handles=handles))
    refused(path, "embed.weight: dtype", "int8", wanted="float32, bfloat16, float16")


# places ----------------------------------------------------------------------------------------------------


def test_ties_are_names_of_one_place(config: BridgeConfigFile) -> None:
    assert tied_names(config) == {"head.weight": "embed.weight"}


def test_storages_are_told_apart_by_handle_and_offset() -> None:
    """The same place in another storage is another place; small tensors share a block of GPU memory."""
    handles = {
        "a": CUDA,
        "b": msgspec.structs.replace(CUDA, storage_offset=512),
        "c": msgspec.structs.replace(CUDA, ipc_handle_b64="b3RoZXI="),
        "d": msgspec.structs.replace(CUDA, tensor_offset=8),
        "e": msgspec.structs.replace(CUDA),
    }
    config = bridge_config("some/model", handles, gpu_uuid="GPU-1")
    assert config.kind == "cuda_ipc"
    assert tied_names(config) == {"e": "a"}


def test_ends_count_strides() -> None:
    """Row 3 of a [4, 2] tensor with rows of 5 elements ends at element 3 * 5 + 1 + 1 = 17: byte 10 + 34 in 16 bits."""
    place = FileHandle(path="x", offset=10, shape=[4, 2], dtype="bfloat16", stride=[5, 1])
    assert bridge_file.end_of(place) == 44


def test_a_trainer_must_see_the_servers_gpu(config: BridgeConfigFile) -> None:
    on_gpu = bridge_config("some/model", {"a": CUDA}, gpu_uuid="GPU-1")
    check_gpu(config, [])
    check_gpu(on_gpu, ["GPU-0", "GPU-1"])
    for visible, got in ((["GPU-0", "GPU-2"], "GPU-0, GPU-2"), ([], "none")):
        with pytest.raises(BridgeError) as caught:
            check_gpu(on_gpu, visible)
        assert (caught.value.field, caught.value.got, caught.value.wanted) == ("gpu_uuid", got, "GPU-1")
        assert "CUDA_VISIBLE_DEVICES" in caught.value.fix
