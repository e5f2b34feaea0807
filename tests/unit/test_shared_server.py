"""The server's end of shared weights, without a server: the bridge file, what is refused, handles, versions."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import msgspec
import pytest
import torch

from vllm_server.bridge_file import FOLDER, BridgeFile
from vllm_server.checks import check_receivable, check_shareable
from vllm_server.errors import FatalError, ServeError
from vllm_server.policy import Lease, PolicyRegistry
from vllm_server.protocol import machine_id
from vllm_server.protocol.bridge_config import FILE_NAME, BridgeConfigFile, FileHandle, Handle, ParamMapping
from vllm_server.worker.shared_weights import plain_parameters, share

# the file --------------------------------------------------------------------------------------------------


def config(boot_id: str = "boot-1", pid: int | None = None) -> BridgeConfigFile:
    handle = FileHandle(path="/proc/1/fd/3", offset=0, shape=[2, 2], dtype="float32", stride=[2, 1])
    return BridgeConfigFile(
        model="tiny",
        tp_degree=1,
        dp_shard_degree=1,
        param_names=["norm.weight"],
        param_mappings={
            "norm.weight": ParamMapping(vllm_name="norm.weight", shape=[2, 2], dtype="float32", device="cpu")
        },
        ipc_handles={"norm.weight": handle},
        shared_weights_enabled=True,
        single_copy_enabled=True,
        num_params=1,
        schema_version=1,
        kind="file",
        server_url="http://127.0.0.1:9001",
        server_pid=os.getpid() if pid is None else pid,
        boot_id=boot_id,
        machine=machine_id(),
        gpu_uuid="",
        vllm_version="0.32.0",
        torch_version="2.13.0",
    )


def test_the_file_goes_where_flag_variable_or_logdir_say_or_else_into_the_temporary_folder(tmp_path: Path) -> None:
    variable = {"VLLM_BRIDGE_CONFIG_PATH": str(tmp_path / "b.json")}
    logdir = {"LOGDIR": str(tmp_path / "logs")}
    assert BridgeFile.choose(str(tmp_path / "a.json"), variable | logdir).path == tmp_path / "a.json"
    assert BridgeFile.choose(str(tmp_path), {}).path == tmp_path / FILE_NAME
    assert BridgeFile.choose(None, variable | logdir).path == tmp_path / "b.json"
    assert BridgeFile.choose(None, logdir).path == tmp_path / "logs" / FILE_NAME
    assert BridgeFile.choose(None, {"LOGDIR": ""}, tmp_path) == BridgeFile(tmp_path / FOLDER / FILE_NAME, True)


def test_what_is_written_is_whole_and_for_its_owner_only(tmp_path: Path) -> None:
    file = BridgeFile(tmp_path / FILE_NAME)
    file.path.write_text("an old one, readable by all")
    file.path.chmod(0o644)
    file.check()
    file.write(config())
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert msgspec.json.decode(file.path.read_bytes(), type=BridgeConfigFile) == config()
    assert list(tmp_path.iterdir()) == [file.path], "no half-written file next to it"


def test_a_write_that_fails_leaves_the_old_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = BridgeFile(tmp_path / FILE_NAME)
    file.write(config("boot-1"))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FatalError) as refused:
        file.write(config("boot-2"))
    assert refused.value.field.endswith(f" {file.path}") and os.strerror(errno.ENOSPC) in refused.value.got
    assert msgspec.json.decode(file.path.read_bytes(), type=BridgeConfigFile).boot_id == "boot-1"
    assert list(tmp_path.iterdir()) == [file.path]


def test_our_folder_is_made_for_us_alone_and_goes_with_the_file(tmp_path: Path) -> None:
    file = BridgeFile.choose(None, {}, tmp_path)
    file.check()
    assert not (tmp_path / FOLDER).exists(), "a check leaves nothing"
    file.write(config())
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700
    file.remove("boot-1")
    assert list(tmp_path.iterdir()) == []


def test_only_ones_own_file_is_removed(tmp_path: Path) -> None:
    file = BridgeFile.choose(None, {}, tmp_path)
    file.write(config("boot-2"))
    file.remove("boot-1")
    assert file.path.exists()
    (tmp_path / "logs").mkdir()
    elsewhere = BridgeFile(tmp_path / "logs" / FILE_NAME)
    elsewhere.write(config("boot-2"))
    elsewhere.remove("boot-2")
    assert (tmp_path / "logs").is_dir(), "no folder of ours"
    elsewhere.remove("boot-2")  # gone already


def test_a_folder_that_others_could_have_prepared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = BridgeFile.choose(None, {}, tmp_path)
    folder = tmp_path / FOLDER
    folder.mkdir(mode=0o700)
    file.check()
    folder.chmod(0o755)
    for act in (file.check, lambda: file.write(config())):
        with pytest.raises(FatalError) as refused:
            act()
        assert str(folder) in refused.value.got and "drwxr-xr-x" in refused.value.got
        assert f"user {os.geteuid()} " in refused.value.wanted and "drwx------" in refused.value.wanted
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(FatalError) as refused:
        file.check()
    assert f"user {os.getuid()} " in refused.value.got and f"user {os.getuid() + 1} " in refused.value.wanted
    monkeypatch.undo()
    folder.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(FatalError) as refused:
        file.check()
    assert "lrwxrwxrwx" in refused.value.got


def test_a_place_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FatalError) as refused:
        BridgeFile(tmp_path / "no; where" / FILE_NAME).check()
    assert str(tmp_path / "no; where") in refused.value.got
    assert shlex.split(refused.value.fix) == ["mkdir", "-p", str(tmp_path / "no; where")]  # as a shell reads it
    assert refused.value.exit_code == 2


def test_the_file_of_a_server_that_runs_is_not_taken_from_it(tmp_path: Path) -> None:
    file = BridgeFile(tmp_path / FILE_NAME)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        file.write(config(pid=other.pid))
        with pytest.raises(FatalError) as refused:
            file.check()
        assert str(other.pid) in refused.value.got and "http://127.0.0.1:9001" in refused.value.got
        long_ago = time.time() - 3600  # so that the process is younger: it has only the number of the server
        os.utime(file.path, (long_ago, long_ago))
        file.check()
    finally:
        other.communicate()
    file.write(config(pid=other.pid))
    file.check()  # it has ended
    file.path.write_text("{ damaged")
    file.check()


# what is refused -------------------------------------------------------------------------------------------


def arguments(**changes: object) -> Namespace:
    plain: dict[str, object] = {
        "port": 9001,
        "uds": None,
        "load_format": "auto",
        "quantization": None,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_sleep_mode": False,
        "cpu_offload_gb": 0.0,
        "kv_transfer_config": None,
        "moe_backend": "auto",
        "language_model_only": True,
    }
    return Namespace(**plain | changes)


def check(
    model: dict[str, object] | None = None,
    device: str = "cuda",
    environment: dict[str, str] | None = None,
    kernel: str = "6.8.0-generic",
    **changes: object,
) -> None:
    check_shareable(arguments(**changes), model or {}, device, environment or {}, kernel)


def test_a_server_with_towers_can_receive_no_weights() -> None:
    conditional = {"text_config": {"hidden_size": 64}}
    check_receivable(arguments(), conditional, "cpu")
    check_receivable(arguments(language_model_only=False), {}, "cpu")
    with pytest.raises(FatalError, match="--no-language-model-only"):
        check_receivable(arguments(language_model_only=False), conditional, "cpu")


def test_a_plain_model_on_one_device_can_be_shared() -> None:
    check()
    check(device="cpu")
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
        ({"enable_sleep_mode": True}, "--enable-sleep-mode True", "False,"),
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
def test_what_cannot_work_is_refused_with_field_got_wanted_and_fix(
    changes: dict[str, object], got: str, wanted: str
) -> None:
    with pytest.raises(FatalError) as refused:
        check(**changes)  # pyright: ignore[reportArgumentType]
    assert (refused.value.exit_code, refused.value.field) == (2, "--shared-weights")
    assert got in refused.value.got and refused.value.wanted.startswith(wanted)
    assert refused.value.wanted and refused.value.fix


def test_what_concerns_cuda_is_no_matter_on_a_cpu() -> None:
    check(
        device="cpu",
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        kernel="microsoft",
        moe_backend="x",
    )


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


def shared_tiny() -> tuple[Tiny, dict[str, Handle]]:
    torch.manual_seed(0)
    model = Tiny()
    with torch.no_grad():
        return model, share(plain_parameters(model), torch.device("cpu"))


def test_parameters_have_their_plain_names_and_tied_ones_each_of_theirs() -> None:
    found = plain_parameters(Tiny())
    assert set(found) == set(Tiny.names)
    assert found["head.weight"] is found["embed.weight"]


def test_a_name_that_would_stand_for_two_parameters_is_refused() -> None:
    model = torch.nn.ModuleDict({"a": Wrapped(torch.nn.Linear(1, 1))})
    model["a"].register_parameter("weight", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"\ba\.weight\b"):
        plain_parameters(model)


def test_sharing_changes_no_bit_and_tied_parameters_keep_one_place() -> None:
    torch.manual_seed(0)
    before = {name: parameter.detach().clone() for name, parameter in plain_parameters(Tiny()).items()}
    model, shared = shared_tiny()
    after = plain_parameters(model)
    assert set(shared) == set(Tiny.names)
    for name, parameter in after.items():
        assert torch.equal(parameter, before[name])
        assert parameter.stride() == before[name].stride()
        assert shared[name].dtype == str(parameter.dtype).removeprefix("torch.")
    assert shared["head.weight"] == shared["embed.weight"]
    assert after["head.weight"].data_ptr() == after["embed.weight"].data_ptr()
    places = {handle.offset for handle in shared.values() if isinstance(handle, FileHandle)}
    assert len(places) == len(Tiny.names) - 1


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


def test_another_process_writes_into_the_parameters_through_their_handles() -> None:
    model, shared = shared_tiny()
    before = {name: parameter.detach().clone() for name, parameter in plain_parameters(model).items()}
    handles = msgspec.json.encode({name: h for name, h in shared.items() if name != "head.weight"})
    subprocess.run(
        [sys.executable, "-c", WRITER], input=handles, check=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    for name, parameter in plain_parameters(model).items():
        assert torch.equal(parameter, before[name] + 1.0), name


def test_the_memory_has_no_name_in_any_folder_and_goes_with_its_processes() -> None:
    code = (
        "import torch; from vllm_server.worker.shared_weights import share, plain_parameters;"
        "model = torch.nn.Linear(2, 2);"
        "shared = share(plain_parameters(model), torch.device('cpu')); print(shared['weight'].path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; torch.set_grad_enabled(False); {code}"],
        capture_output=True, text=True, check=True, timeout=120, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.startswith("/proc/")
    assert not Path(done.stdout.strip()).exists()


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


# versions --------------------------------------------------------------------------------------------------


def test_a_request_knows_the_version_that_it_began_with_when_the_base_model_changes() -> None:
    registry = PolicyRegistry(served_name="model", lora_name="policy", keep=2, capacity=4)
    lease = Lease(registry.resolve(), registry.base.version)
    assert (lease.began_with, lease.ended_with) == (0, None)
    registry.rebase(3)
    assert (lease.began_with, lease.ended_with) == (0, 3)
    assert registry.resolve(policy_version=3) is registry.base
    with pytest.raises(ServeError) as refused:
        registry.resolve(policy_version=0)
    assert (refused.value.field, refused.value.got) == ("policy_version", "0")
    assert registry.name_for(None, None) == ("policy-v4", 4)


def test_a_version_may_go_back_as_after_a_proof_or_a_resumed_run() -> None:
    registry = PolicyRegistry(served_name="model", lora_name="policy", keep=2, capacity=4, base_version=9)
    registry.rebase(-1)
    assert registry.newest.version == -1
    registry.rebase(4)
    assert registry.newest.version == 4
    assert registry.name_for(None, None) == ("policy-v10", 10), "no name is used twice"
