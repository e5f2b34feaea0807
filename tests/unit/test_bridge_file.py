"""The bridge file: what the server writes and refuses to write, what the trainer reads and refuses."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from msgspec.structs import replace

from grpo_trainer.errors import BridgeError
from grpo_trainer.shared.bridge_file import read_bridge_config, tied_names
from tests.golden.stand_in import bridge_config, write_config, write_tensors
from tests.processes import ROOT
from tests.unit.factories import refusing
from vllm_server.bridge_file import FOLDER, BridgeFile
from vllm_server.checks import check_receivable, check_shareable
from vllm_server.errors import FatalError
from vllm_server.protocol import machine_id
from vllm_server.protocol.bridge_config import FILE_NAME, BridgeConfigFile, CudaIpcHandle, FileHandle, RankWeights
from vllm_server.worker.shared_weights import plain_parameters, share


@pytest.fixture
def config(tmp_path: Path) -> BridgeConfigFile:
    """A file that is in order: two parameters, one of them under two names."""
    weight = torch.zeros(4, 8)
    tensors = {"embed.weight": weight, "norm.weight": torch.zeros(8), "head.weight": weight}
    return bridge_config("some/model", write_tensors(tmp_path / "memory", tensors))


def refused(path: Path, field: str = "", got: str = "", *, wanted: str = "", fix: str = "") -> None:
    """That the file is refused for this field, with these in what came, in what was wanted and in the fix."""
    with pytest.raises(BridgeError) as caught:
        read_bridge_config(path)
    assert caught.value.field == (f"{path}: {field}" if field else str(path))
    for part, word in ((caught.value.got, got), (caught.value.wanted, wanted), (caught.value.fix, fix)):
        assert word in part


# reading ---------------------------------------------------------------------------------------------------


def test_reader_takes_a_named_file_or_its_folder(tmp_path: Path, config: BridgeConfigFile) -> None:
    path = write_config(tmp_path, config)
    assert read_bridge_config(path) == read_bridge_config(tmp_path) == config
    with refusing(BridgeError, f"--vllm-config-path {tmp_path / 'nowhere.json'}", got=os.strerror(errno.ENOENT)):
        read_bridge_config(tmp_path / "nowhere.json")
    path.unlink()
    path.mkdir()
    with refusing(BridgeError, f"--vllm-config-path {path}", got=os.strerror(errno.EISDIR)):
        read_bridge_config(tmp_path)


# refusing --------------------------------------------------------------------------------------------------


def test_reader_refuses_a_file_of_others_and_of_a_server_that_is_gone(
    tmp_path: Path, config: BridgeConfigFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path, config)
    for mode in (0o640, 0o604, 0o660, 0o622):
        path.chmod(mode)
        refused(path, "mode", f"{mode:04o}", wanted="0600", fix="chmod")
    path.chmod(0o600)
    with monkeypatch.context() as of_another:
        of_another.setattr(os, "geteuid", lambda: os.getuid() + 1)
        refused(path, "owner", f"uid {os.getuid()}", wanted=str(os.getuid() + 1))
    os.utime(path, (1e9, 1e9))  # written in 2001, before the process with the server's number was
    refused(path, "server_pid", str(os.getpid()))
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    refused(write_config(tmp_path, replace(config, server_pid=done.pid)), "server_pid", str(done.pid))


def test_reader_refuses_a_value_that_it_cannot_use(tmp_path: Path, config: BridgeConfigFile) -> None:
    in_8_bits = {
        field: {name: replace(entry, dtype="int8") for name, entry in getattr(config, field).items()}
        for field in ("param_mappings", "ipc_handles")
    }
    for changes, field, got, wanted in (
        ({"machine": "before"}, "machine", "before", machine_id()),
        ({"tp_degree": 4}, "tp_degree", "4", "1"),
        (in_8_bits, "embed.weight: dtype", "int8", "float32, bfloat16, float16"),
    ):
        refused(write_config(tmp_path, replace(config, **changes)), field, got, wanted=wanted)


def test_reader_refuses_a_file_that_is_damaged_cut_short_anywhere_or_of_another_release(
    tmp_path: Path, config: BridgeConfigFile
) -> None:
    path = write_config(tmp_path, config)
    whole = path.read_bytes()
    foreign = (b"[]", b'{"schema_version": 1}', b'{"schema_version": "one"}', b"\x00\xff")
    for content in (*(whole[:length] for length in range(0, len(whole), 7)), *foreign):
        path.write_bytes(content)
        refused(path, fix="start")
    path.write_text('{"schema_version": 2, "weights": []}')  # recognised by its number where its fields are unknown
    refused(path, "schema_version", "2", wanted="1", fix="install")


# several workers -------------------------------------------------------------------------------------------


def test_each_rank_gets_its_workers_weights(tmp_path: Path, config: BridgeConfigFile) -> None:
    memory = write_tensors(tmp_path / "second", {name: torch.ones(2) for name in config.param_names})
    shapes = {name: replace(config.param_mappings[name], shape=memory[name].shape) for name in memory}
    second = RankWeights(rank=1, param_mappings=shapes, ipc_handles=memory, gpu_uuid="")
    path = write_config(tmp_path, replace(config, tp_degree=2, further_ranks=[second]))
    assert read_bridge_config(path, 0, 2).ipc_handles == config.ipc_handles
    assert read_bridge_config(path, 1, 2).ipc_handles == memory
    refused(path, "tp_degree", "2", wanted="1", fix="--server.tensor-parallel-size 2")
    with refusing(BridgeError, f"{path}: tp_degree", got="1"):
        read_bridge_config(write_config(tmp_path, config), 1, 2)


CUDA = CudaIpcHandle(
    device_index=0, ipc_handle_b64="aGFuZGxl", storage_size=32, storage_offset=0, ref_counter_handle_b64="",
    ref_counter_offset=0, event_handle_b64="", event_sync_required=False, shape=[8], dtype="float32", stride=[1],
    tensor_offset=0,
)  # fmt: skip


# places ----------------------------------------------------------------------------------------------------


def test_storages_are_told_apart_by_handle_and_offset() -> None:
    """The same place in another storage is another place; small tensors share a block of GPU memory."""
    handles = {
        "a": CUDA,
        "b": replace(CUDA, storage_offset=512),
        "c": replace(CUDA, ipc_handle_b64="b3RoZXI="),
        "d": replace(CUDA, tensor_offset=8),
        "e": replace(CUDA),
    }
    config = bridge_config("some/model", handles, gpu_uuid="GPU-1")
    assert config.kind == "cuda_ipc"
    assert tied_names(config) == {"e": "a"}


# the file --------------------------------------------------------------------------------------------------


def written_by(boot_id: str = "boot-1", pid: int | None = None) -> BridgeConfigFile:
    handle = FileHandle(path="/proc/1/fd/3", offset=0, shape=[2, 2], dtype="float32", stride=[2, 1])
    return bridge_config("tiny", {"norm.weight": handle}, boot_id=boot_id, server_pid=pid or os.getpid())


def test_writer_chooses_flag_variable_logdir_or_the_temporary_folder(tmp_path: Path) -> None:
    variable = {"VLLM_BRIDGE_CONFIG_PATH": str(tmp_path / "b.json")}
    logdir = {"LOGDIR": str(tmp_path / "logs")}
    assert BridgeFile.choose(str(tmp_path / "a.json"), variable | logdir).path == tmp_path / "a.json"
    assert BridgeFile.choose(str(tmp_path), {}).path == tmp_path / FILE_NAME
    assert BridgeFile.choose(None, variable | logdir).path == tmp_path / "b.json"
    assert BridgeFile.choose(None, logdir).path == tmp_path / "logs" / FILE_NAME
    assert BridgeFile.choose(None, {"LOGDIR": ""}, tmp_path) == BridgeFile(tmp_path / FOLDER / FILE_NAME, True)


def test_writer_writes_whole_files_for_their_owner_only(tmp_path: Path) -> None:
    file = BridgeFile(tmp_path / FILE_NAME)
    file.path.write_text("an old one, readable by all")
    file.path.chmod(0o644)
    file.check()
    file.write(written_by())
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert msgspec.json.decode(file.path.read_bytes(), type=BridgeConfigFile) == written_by()
    assert list(tmp_path.iterdir()) == [file.path], "no half-written file next to it"


def test_writer_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = BridgeFile(tmp_path / FILE_NAME)
    file.write(written_by("boot-1"))

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=full))
    with pytest.raises(FatalError) as refused:
        file.write(written_by("boot-2"))
    assert refused.value.field.endswith(f" {file.path}") and os.strerror(errno.ENOSPC) in refused.value.got
    assert msgspec.json.decode(file.path.read_bytes(), type=BridgeConfigFile).boot_id == "boot-1"
    assert list(tmp_path.iterdir()) == [file.path]


def test_writer_makes_a_folder_for_us_alone_that_goes_with_the_file(tmp_path: Path) -> None:
    file = BridgeFile.choose(None, {}, tmp_path)
    file.check()
    assert not (tmp_path / FOLDER).exists(), "a check leaves nothing"
    file.write(written_by("boot-2"))
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700
    file.remove("boot-1")
    assert file.path.exists(), "another server's"
    file.remove("boot-2")
    assert list(tmp_path.iterdir()) == []
    elsewhere = BridgeFile(tmp_path / FILE_NAME)
    elsewhere.write(written_by("boot-2"))
    for _ in range(2):  # the second time it is gone already
        elsewhere.remove("boot-2")
    assert list(tmp_path.iterdir()) == [], "the folder is not ours"


def test_writer_refuses_a_folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = BridgeFile.choose(None, {}, tmp_path)
    folder = tmp_path / FOLDER
    folder.mkdir(mode=0o700)
    file.check()
    folder.chmod(0o755)
    for act in (file.check, lambda: file.write(written_by())):
        with pytest.raises(FatalError) as refused:
            act()
        assert str(folder) in refused.value.got and "drwxr-xr-x" in refused.value.got
        assert f"user {os.geteuid()} " in refused.value.wanted and "drwx------" in refused.value.wanted
    folder.chmod(0o700)
    with monkeypatch.context() as of_another, pytest.raises(FatalError) as refused:
        of_another.setattr(os, "geteuid", lambda: os.getuid() + 1)
        file.check()
    assert f"user {os.getuid()} " in refused.value.got and f"user {os.getuid() + 1} " in refused.value.wanted
    folder.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(FatalError) as refused:
        file.check()
    assert "lrwxrwxrwx" in refused.value.got


def test_writer_refuses_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FatalError) as refused:
        BridgeFile(tmp_path / "no; where" / FILE_NAME).check()
    assert str(tmp_path / "no; where") in refused.value.got
    assert shlex.split(refused.value.fix) == ["mkdir", "-p", str(tmp_path / "no; where")]  # as a shell reads it
    assert refused.value.exit_code == 2


def test_writer_refuses_the_file_of_a_server_that_runs(tmp_path: Path) -> None:
    file = BridgeFile(tmp_path / FILE_NAME)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        file.write(written_by(pid=other.pid))
        with pytest.raises(FatalError) as refused:
            file.check()
        assert str(other.pid) in refused.value.got and "http://127.0.0.1:9001" in refused.value.got
        long_ago = time.time() - 3600  # so that the process is younger: it has only the number of the server
        os.utime(file.path, (long_ago, long_ago))
        file.check()
    finally:
        other.communicate()
    file.write(written_by(pid=other.pid))
    file.check()  # it has ended
    file.path.write_text("{ damaged")
    file.check()


# what is refused -------------------------------------------------------------------------------------------


def arguments(**changes: object) -> Namespace:
    plain: dict[str, object] = {
        "port": 9001, "uds": None, "load_format": "auto", "quantization": None, "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_sleep_mode": False, "cpu_offload_gb": 0.0,
        "kv_transfer_config": None, "moe_backend": "auto", "language_model_only": True,
    }  # fmt: skip
    return Namespace(**plain | changes)


def check(
    model: dict[str, object] | None = None,
    device: str = "cuda",
    environment: dict[str, str] | None = None,
    kernel: str = "6.8.0-generic",
    **changes: object,
) -> None:
    check_shareable(arguments(**changes), model or {}, device, environment or {}, kernel)


def test_check_receivable_refuses_a_server_with_towers() -> None:
    conditional = {"text_config": {"hidden_size": 64}}
    check_receivable(arguments(), conditional, "cpu")
    check_receivable(arguments(language_model_only=False), {}, "cpu")
    with pytest.raises(FatalError, match="--no-language-model-only"):
        check_receivable(arguments(language_model_only=False), conditional, "cpu")


def test_check_shareable_takes_a_plain_model() -> None:
    check()
    on_cuda_only = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    check(device="cpu", environment=on_cuda_only, kernel="microsoft", moe_backend="x")
    check({"quantization_config": None, "text_config": {"hidden_size": 64}}, moe_backend="triton")
    check({"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}, tensor_parallel_size=2)
    check(port=0, uds="/run/vllm.sock")
    check(environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64"})


@pytest.mark.parametrize(
    ("changes", "got", "wanted"),
    [
        (
            {"tensor_parallel_size": 4, "model": {"num_attention_heads": 8, "num_key_value_heads": 2}},
            *("--tensor-parallel-size 4, and a num_key_value_heads of 2", "a multiple of 4"),
        ),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2", "1,"),
        ({"data_parallel_size": 2}, "--data-parallel-size 2", "1,"),
        ({"cpu_offload_gb": 4.0}, "--cpu-offload-gb 4.0", "0,"),
        ({"kv_transfer_config": {"kv_connector": "x"}}, "--kv-transfer-config {'kv_connector': 'x'}", "none,"),
        ({"port": 0}, "--port 0", ""),
        ({"load_format": "bitsandbytes"}, "--load-format bitsandbytes", ""),
        ({"load_format": "gguf"}, "--load-format gguf", ""),
        ({"quantization": "fp8"}, "--quantization fp8", "none,"),
        ({"model": {"quantization_config": {"quant_method": "awq"}}}, "quantization_config (awq)", ""),
        ({"model": {"text_config": {"quantization_config": {"bits": 4}}}}, "quantization_config (?)", ""),
        ({"model": {"quantization_config": "awq", "text_config": ["x"]}}, "quantization_config (awq)", ""),
        ({"model": {"compression_config": {"quant_method": "x"}}}, "compression_config (x)", ""),
        ({"model": {"kv_lora_rank": 512}}, "kv_lora_rank 512", ""),
        (
            {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "a:1, expandable_segments: True"}},
            "PYTORCH_CUDA_ALLOC_CONF=a:1, expandable_segments: True",
            "no expandable_segments,",
        ),
        ({"environment": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}, "PYTORCH_ALLOC_CONF=", ""),
        ({"kernel": "5.15.90.1-microsoft-standard-WSL2"}, "WSL (5.15.90.1-microsoft", ""),
        ({"moe_backend": "flashinfer_cutlass"}, "--moe-backend flashinfer_cutlass", "triton,"),
    ],
)
def test_check_shareable_refuses_what_cannot_work(changes: dict[str, object], got: str, wanted: str) -> None:
    with pytest.raises(FatalError) as refused:
        check(**changes)  # pyright: ignore[reportArgumentType]
    assert (refused.value.exit_code, refused.value.field) == (2, "--shared-weights")
    assert got in refused.value.got and refused.value.wanted.startswith(wanted)
    assert refused.value.wanted and refused.value.fix


# handles ---------------------------------------------------------------------------------------------------


class Wrapped(torch.nn.Module):
    """As vLLM's LoRA layers: the plain one within."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Tiny(torch.nn.Module):
    """A tied head, a wrapped layer, two dtypes, and two parameters in one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.proj = Wrapped(torch.nn.Linear(3, 4, dtype=torch.bfloat16))
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        both = torch.arange(6.0)
        self.first = torch.nn.Parameter(both[:2])
        self.second = torch.nn.Parameter(both[2:].view(2, 2).t())  # in columns

    names = ("embed.weight", "proj.weight", "proj.bias", "head.weight", "first", "second")


def test_a_name_that_would_stand_for_two_parameters_is_refused() -> None:
    model = torch.nn.ModuleDict({"a": Wrapped(torch.nn.Linear(1, 1))})
    model["a"].register_parameter("weight", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"\ba\.weight\b"):
        plain_parameters(model)


WRITER = """
import os, sys, msgspec, torch
from vllm_server.protocol.bridge_config import Handle
handles = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, Handle])
size = os.stat(handles["first"].path).st_size
memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage.from_file(handles["first"].path, True, size))
for name, handle in handles.items():
    dtype = getattr(torch, handle.dtype)
    there = torch.as_strided(memory.view(dtype), handle.shape, handle.stride, handle.offset // dtype.itemsize)
    there.add_(1.0)
"""


def test_sharing_changes_no_bit_and_another_process_writes_through_the_handles() -> None:
    """Tied parameters have each of their names, and one place."""
    torch.manual_seed(0)
    model = Tiny()
    plain = plain_parameters(model)
    assert set(plain) == set(Tiny.names) and plain["head.weight"] is plain["embed.weight"]
    before = {name: parameter.detach().clone() for name, parameter in plain.items()}
    strides = {name: parameter.stride() for name, parameter in plain.items()}
    with torch.no_grad():
        shared = share(plain, torch.device("cpu"))
    after = plain_parameters(model)
    assert set(shared) == set(Tiny.names)
    for name, parameter in after.items():
        assert torch.equal(parameter, before[name]) and parameter.stride() == strides[name]
        assert shared[name].dtype == str(parameter.dtype).removeprefix("torch.")
    assert shared["head.weight"] == shared["embed.weight"]
    places = {handle.offset for handle in shared.values() if isinstance(handle, FileHandle)}
    assert len(places) == len(Tiny.names) - 1
    handles = msgspec.json.encode({name: handle for name, handle in shared.items() if name != "head.weight"})
    subprocess.run([sys.executable, "-c", WRITER], input=handles, check=True, timeout=120, cwd=ROOT)
    for name, parameter in after.items():
        assert torch.equal(parameter, before[name] + 1.0), name


@pytest.mark.parametrize(
    ("parameter", "got"),
    [
        (torch.zeros(0), r"\[0\]"),
        (torch.zeros(2, dtype=torch.int8), "int8"),
        (torch.zeros(2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.zeros(2, device="meta"), "meta"),
    ],
)
def test_parameters_that_a_trainer_could_not_write_to_are_refused(parameter: torch.Tensor, got: str) -> None:
    with pytest.raises(ValueError, match=f"^w: .*{got}"):
        share({"w": parameter}, torch.device("cpu"))
