"""What a request may hold: refused in parts before the engine sees it, never an error of the server's own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from tests.unit.test_policy_publisher import RANK, load, make_publisher, save_adapter
from vllm_server.adapters import check_config
from vllm_server.errors import ServeError
from vllm_server.fence import Fence
from vllm_server.generate import check_integers
from vllm_server.http import endpoint, json_response, parse_body
from vllm_server.policy import PolicyRegistry
from vllm_server.protocol import HIGHEST_VERSION, LoraLoadRequest, UpdateEndRequest
from vllm_server.publisher import Publisher

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def refusal(publisher: Publisher, path: str, **more: Any) -> ServeError:
    """Of a publish; it names what was wrong, in all parts, and the next publish works."""
    with pytest.raises(ServeError) as refused:
        asyncio.run(asyncio.wait_for(load(publisher, path, **more), 60))
    error = refused.value
    assert 400 <= error.status < 500
    assert error.field and error.wanted and error.fix
    assert publisher.registry.load_count == 0
    return error


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def publisher(root: Path) -> Publisher:
    return make_publisher(root)


@pytest.mark.parametrize("version", [-1, HIGHEST_VERSION + 1, 2**63, 10**30])
def test_versions_that_are_none(publisher: Publisher, root: Path, version: int) -> None:
    folder = save_adapter(root / "a")
    assert refusal(publisher, folder, version=version).field == "version"
    if len(str(version)) <= 18:
        assert refusal(publisher, folder, adapter_name=f"policy-v{version}", version=version).field == "version"


def test_a_number_in_the_name_has_the_same_bound(publisher: Publisher, root: Path) -> None:
    folder = save_adapter(root / "a")
    assert refusal(publisher, folder, adapter_name=f"policy-v{HIGHEST_VERSION + 1}").field == "version"
    answer = asyncio.run(load(publisher, folder, adapter_name=f"policy-v{HIGHEST_VERSION}"))
    assert answer.policy_version == 2**53


@pytest.mark.parametrize("name", ["a\r\nb", "\0", "a\x7f", "\u2028", "\x1b[31m", "x" * 257])
def test_names_that_are_none(publisher: Publisher, root: Path, name: str) -> None:
    error = refusal(publisher, save_adapter(root / "a"), adapter_name=name)
    assert error.field == "adapter_name"
    assert error.got.isprintable() and len(error.got) < 300


def test_names_of_other_languages_are_taken(publisher: Publisher, root: Path) -> None:
    names = ("Ünïcode 策略", "x" * 256)
    for name in names:
        answer = asyncio.run(load(publisher, save_adapter(root / name[:9]), adapter_name=name))
        assert answer.adapter_name == name


def test_versions_of_shared_weights_have_the_same_bound() -> None:
    class Engine:
        async def hold(self, *, abort: bool) -> None: ...
        async def release(self) -> None: ...
        async def renew(self, *, recompute: bool) -> None: ...

    async def story() -> None:
        from vllm_server.protocol import PROOF_VERSION, UpdateBeginRequest

        fence = Fence("boot", Engine(), on_version=lambda _: None)
        for version in (-2, HIGHEST_VERSION + 1, 10**30):
            begun = await fence.begin(UpdateBeginRequest(boot_id="boot"))
            with pytest.raises(ServeError) as refused:
                await fence.end(UpdateEndRequest(token=begun.token, version=version))
            assert (refused.value.status, refused.value.field) == (422, "version")
            await fence.end(UpdateEndRequest(token=begun.token, version=PROOF_VERSION))

    asyncio.run(story())


def test_a_registry_counts_within_the_bound() -> None:
    registry = PolicyRegistry(served_name="base", lora_name="policy", keep=1, capacity=2, base_version=HIGHEST_VERSION)
    with pytest.raises(ServeError) as refused:
        registry.name_for(None, None)
    assert refused.value.field == "version"


@pytest.mark.parametrize("path", ["x" * 5000, "/".join(["y" * 200] * 30), "~nosuchuser/x", "a\0b", "circle", ""])
def test_paths_that_are_none(publisher: Publisher, root: Path, path: str) -> None:
    (root / "circle").symlink_to("circle")
    error = refusal(publisher, str(root / path) if path == "circle" else path)
    assert error.field == "adapter_path"
    assert len(error.got) < 5000 or error.status == 403


def test_a_folder_whose_name_is_no_text_is_refused_in_text(publisher: Publisher, root: Path) -> None:
    (root / "link").symlink_to(os.fsdecode(b"\xff"))
    assert json_response(refusal(publisher, str(root / "link")).response()).body


@pytest.mark.parametrize("where", ["file", "folder"])
def test_no_link_leads_out_of_the_root(publisher: Publisher, root: Path, tmp_path: Path, where: str) -> None:
    outside = Path(save_adapter(tmp_path / "outside"))
    folder = Path(save_adapter(root / "a"))
    if where == "folder":
        (root / "link").symlink_to(outside)
        assert refusal(publisher, str(root / "link")).status == 403
        return
    for name in (CONFIG, WEIGHTS):
        (folder / name).rename(folder / "aside")
        (folder / name).symlink_to(outside / name)
        assert refusal(publisher, str(folder)).status == 403
        (folder / name).unlink()
        (folder / "aside").rename(folder / name)
    assert asyncio.run(load(publisher, str(folder))).load_count == 1


def test_links_within_the_root_are_followed(publisher: Publisher, root: Path) -> None:
    blobs, folder = Path(save_adapter(root / "blobs")), root / "snapshot"
    folder.mkdir()
    for name in (CONFIG, WEIGHTS):
        (folder / name).symlink_to(Path("../blobs") / name)
    assert asyncio.run(load(publisher, str(folder))).adapter_path == str(folder)
    assert blobs.is_dir()


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "link-to-device"])
def test_only_regular_files_are_opened_and_nobody_waits(
    publisher: Publisher, root: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    folder = Path(save_adapter(root / "a"))
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    elif kind == "socket":
        monkeypatch.chdir(folder)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(name)
    else:
        (folder / name).symlink_to("/dev/zero")
    error = refusal(publisher, str(folder))
    assert error.field == ("adapter_path" if kind == "link-to-device" else name)
    assert asyncio.run(load(publisher, save_adapter(root / "good"))).load_count == 1


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"r":' * 100_000, b"\xff\xfe", b"", b"null", b'{"r": 1' + b"0" * 5000 + b"}", b" " * (2 << 20)],
)
def test_a_configuration_that_is_none(publisher: Publisher, root: Path, text: bytes) -> None:
    folder = Path(save_adapter(root / "a"))
    (folder / CONFIG).write_bytes(text)
    error = refusal(publisher, str(folder))
    assert error.field == CONFIG
    assert len(error.got) < 300


DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize("value", [DEEP, "x" * 10_000, 10**400, float("nan"), {"a": DEEP}, True])
@pytest.mark.parametrize("field", ["lora_alpha", "target_modules", "use_rslora", "r", "bias"])
def test_fields_that_hold_something_else_are_shown_in_short(field: str, value: object) -> None:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], field: value}
    if (field, value) in (("use_rslora", True), ("r", True), ("target_modules", "x" * 10_000)):
        check_config(config, max_rank=8)
        return
    with pytest.raises(ServeError) as refused:
        check_config(config, max_rank=8)
    assert refused.value.field == field
    assert len(refused.value.got) <= 200


def test_an_answer_holds_only_what_was_understood(publisher: Publisher, root: Path) -> None:
    folder = save_adapter(root / "a", secret="private", use_rslora=True, note=[[[["deep"]]]])
    answer = asyncio.run(load(publisher, folder))
    assert answer.adapter_config == {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"seed": 2**70}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"prompt": {"prompt_token_ids": [1, 2**63]}}, "prompt"),
        ({"stop_token_ids": [[2**64]]}, "stop_token_ids"),
        ({"policy_version": 10**30}, "policy_version"),
    ],
)
def test_integers_that_the_engine_cannot_hold(body: dict[str, Any], key: str) -> None:
    with pytest.raises(ServeError) as refused:
        check_integers({"n": 1, **body})
    assert (refused.value.status, refused.value.field) == (422, key)
    check_integers({"seed": 2**63 - 1, "logprobs": -(2**63), "temperature": 1e300, "prompt": "1", "stop": ["9" * 30]})


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"\xff": 1}', b"\xff", b'{"seed": 1e999}'])
def test_bodies_that_are_no_json(body: bytes) -> None:
    for kind in (dict[str, Any], LoraLoadRequest):
        with pytest.raises(ServeError) as refused:
            parse_body(body, kind)
        assert (refused.value.status, refused.value.field) == (422, "body")


def test_what_reads_a_body_too_deeply_is_a_refusal() -> None:
    async def handler() -> Any:
        raise RecursionError

    answer = asyncio.run(endpoint(handler)(Request({"type": "http"})))  # type: ignore[arg-type]
    assert answer.status_code == 422
    assert json.loads(bytes(answer.body))["error"]["param"] == "body"


def test_a_body_that_breaks_off_is_no_error_of_the_server() -> None:
    async def handler() -> Any:
        raise ClientDisconnect

    answer = asyncio.run(endpoint(handler)(Request({"type": "http"})))  # type: ignore[arg-type]
    assert answer.status_code == 499
