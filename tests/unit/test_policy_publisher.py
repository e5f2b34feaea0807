"""Publishing on a stand-in engine: order of events, room, a publish that fails half-way, what a request may hold."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.factories import refusing
from vllm_server import routes
from vllm_server.adapters import check_config
from vllm_server.channels import Channels
from vllm_server.errors import ServeError
from vllm_server.fence import Fence
from vllm_server.http import json_response
from vllm_server.policy import PolicyRegistry
from vllm_server.protocol import HIGHEST_VERSION, LoraLoadRequest, LoraUnloadRequest
from vllm_server.publisher import Delivery, Installed, Publisher

RANK = 4
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


class StandInEngine:
    """Remembers what it was asked; `fails` names the calls that raise."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.fails: set[str] = set()

    def next_id(self) -> int:
        return len(self.events) + 1

    async def add(self, name: str, adapter_id: int, delivery: Delivery) -> Installed:
        self._event(f"add {name}")
        return Installed(slot=len(self.events), replayed=False, stall_seconds=0.0)

    async def remove(self, name: str, adapter_id: int) -> None:
        self._event(f"remove {name}")

    def _event(self, event: str) -> None:
        self.events.append(event)
        if event in self.fails:
            raise RuntimeError(f"no {event}")


def save_adapter(folder: Path, **config: Any) -> str:
    folder.mkdir(parents=True)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": torch.ones(RANK, 6), f"{module}.lora_B.weight": torch.ones(6, RANK)}
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]} | config)
    )
    return str(folder)


class Publishing:
    """A publisher of adapters below a root."""

    def __init__(self, root: Path, *, keep: int = 2, capacity: int = 3, timeout: float = 5.0) -> None:
        held = PolicyRegistry(served_name="base", lora_name="policy", keep=keep, capacity=capacity)
        nothing: Any = None
        channels = Channels(nothing, Fence("boot", nothing, on_version=lambda _: None), accepts=False, max_rank=8)
        self.root = root
        self.engine: Any = StandInEngine()
        self.publisher = Publisher(held, self.engine, channels, (root.resolve(),), room_timeout_s=timeout)
        self.serving = self.publisher.serving

    def load(self, adapter: int | str, **more: Any) -> Coroutine[Any, Any, Any]:
        """Publish what is at a path, or an adapter of a number, which is saved first."""
        if isinstance(adapter, int):
            folder = self.root / f"{adapter}"
            adapter = str(folder) if folder.exists() else save_adapter(folder)
        return self.publisher.load(LoraLoadRequest(adapter_path=adapter, **more))


@pytest.fixture
def made(tmp_path: Path, request: pytest.FixtureRequest) -> Publishing:
    (tmp_path / "root").mkdir()
    return Publishing(tmp_path / "root", **getattr(request, "param", {}))


def publishing(**options: Any) -> pytest.MarkDecorator:
    """Of a test whose publisher has these options."""
    return pytest.mark.parametrize("made", [options], indirect=True)


async def test_publisher_answers_a_repeated_request_with_its_first_answer(made: Publishing) -> None:
    first, again = await asyncio.gather(*(made.load(1, adapter_name="policy-v1", request_id="r") for _ in range(2)))
    assert first == again and first.load_count == 1
    with refusing(ServeError, "adapter_name", got="policy-v1"):
        await made.load(1, adapter_name="policy-v1", request_id="another")
    assert made.engine.events == ["add policy-v1"]


@publishing(keep=1, capacity=2)
async def test_publisher_waits_for_a_place_that_requests_hold(made: Publishing) -> None:
    await made.load(1)
    with made.serving():
        await made.load(2)
        third = asyncio.create_task(made.load(3))
        await asyncio.sleep(0.05)
        assert not third.done()  # version 1 is being used, version 2 is the newest: no place
    assert (await third).policy_version == 3
    assert made.engine.events.index("remove policy-v1") < made.engine.events.index("add policy-v3")


@publishing(keep=1, capacity=2)
async def test_publisher_of_a_server_that_sleeps_refuses_adapters(made: Publishing) -> None:
    """And the server does not sleep before a publish that has begun is over."""

    async def nothing(level: int = 1) -> None: ...

    channels, args = made.publisher.channels, SimpleNamespace(shared_weights=False, enable_sleep_mode=True)
    engine = SimpleNamespace(sleep=nothing, wake_up=nothing)
    server: Any = SimpleNamespace(fence=channels.fence, channels=channels, args=args, engine=engine)
    await made.load(1)
    with made.serving():
        await made.load(2)
        third = asyncio.create_task(made.load(3))  # waits for a place
        await asyncio.sleep(0.01)
        sleeping = asyncio.ensure_future(routes.sleep(server))
        await asyncio.sleep(0.01)
        assert not (third.done() or sleeping.done())
    await asyncio.gather(third, sleeping)
    with refusing(ServeError, "sleep", 409):
        await made.load(4)
    await routes.wake_up(server)
    assert (await made.load(4)).policy_version == 4


class SlowEngine(StandInEngine):
    """Has four slots, and takes its time to free one."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[str] = set()

    async def add(self, name: str, adapter_id: int, delivery: Delivery) -> Installed:
        assert len(self.held) < 4, "all slots are taken"
        self.held.add(name)
        return await super().add(name, adapter_id, delivery)

    async def remove(self, name: str, adapter_id: int) -> None:
        await asyncio.sleep(0.02)
        self.held.remove(name)
        await super().remove(name, adapter_id)


@publishing(keep=1, capacity=4)
async def test_publisher_waits_for_slots_that_are_being_freed(made: Publishing) -> None:
    engine: Any = SlowEngine()
    made.publisher.engine = engine
    with ExitStack() as running:
        for number in (1, 2, 3, 4):
            await made.load(number)
            running.enter_context(made.serving())
    for number in (5, 6, 7):  # the first three are on their way out of the engine, one after the other
        assert (await made.load(number)).policy_version == number
    while engine.held != {"policy-v7"}:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("kind", "field"), [("disk", "adapter_path"), ("memory", "body")])
async def test_publisher_names_the_part_of_the_request_that_the_engine_refuses(
    made: Publishing, kind: str, field: str
) -> None:
    made.engine.fails = {"add policy-v1"}
    folder = Path(save_adapter(made.root / "1"))
    body = made.root / "body"
    save_file(load_file(folder / WEIGHTS), body, {"adapter_config": (folder / CONFIG).read_text()})
    with refusing(ServeError, field):
        await (made.load(1) if kind == "disk" else made.publisher.load(LoraLoadRequest(), str(body)))


@publishing(keep=1, capacity=3, timeout=0.05)
async def test_publisher_refuses_when_no_place_comes_free(made: Publishing) -> None:
    await made.load(1)
    await made.load(9, adapter_name="policy-proof", version=0, activate=False)
    with made.serving():
        await made.load(2)
        with pytest.raises(ServeError) as refused:
            await made.load(3)
        assert refused.value.status == 503 and "--max-loras" in refused.value.fix
        assert "policy-proof" in refused.value.got and made.publisher.registry.newest.name == "policy-v2"


async def test_publisher_serves_the_old_version_after_a_load_that_failed(made: Publishing) -> None:
    await made.load(1)
    made.engine.fails = {"add policy-v2"}
    with pytest.raises(ServeError) as refused:
        await made.load(2)
    assert refused.value.status == 422 and "add policy-v2" in refused.value.got
    assert made.engine.events[-1] == "remove policy-v2"  # what the engine may have kept of it
    with made.serving() as version:
        assert version.name == "policy-v1"


async def test_publisher_stops_generation_half_way_until_a_publish_succeeds(made: Publishing) -> None:
    made.engine.fails = {"add policy-v1", "remove policy-v1"}
    with pytest.raises(ServeError) as refused:
        await made.load(1)
    assert refused.value.status == 503
    with refusing(ServeError, "policy", 503) as half_way, made.serving():
        pass
    assert all(call in half_way.value.got for call in made.engine.fails)
    await made.load(2, version=2)
    with made.serving() as version:
        assert version.name == "policy-v2"


async def test_publisher_unloads_now_or_when_idle(made: Publishing) -> None:
    async def unload(**named: Any) -> tuple[str, str | None, int]:
        gone = await made.publisher.unload(LoraUnloadRequest(**named))
        return gone.status, gone.previous_name, gone.policy_version

    await made.load(1)
    await made.load(2)
    with made.serving():
        assert await unload() == ("draining", "policy-v2", 1)
    assert await unload(adapter_name="policy-v1") == ("success", "policy-v1", 0)
    assert (await unload())[:2] == ("success", None)
    removed = [event for event in made.engine.events if "remove" in event]
    assert sorted(removed) == ["remove policy-v1", "remove policy-v2"]


def test_publish_tells_missing_damaged_and_unservable_adapters_apart(made: Publishing) -> None:
    assert refusal(made, str(made.root / "nothing")).status == 404
    weights = Path(save_adapter(made.root / "1")) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    damaged, size = refusal(made, str(made.root / "1")), weights.stat().st_size
    assert (damaged.status, damaged.field) == (422, weights.name) and f"{size} of {size + 1} bytes" in damaged.got
    weights.unlink()
    gone = refusal(made, str(made.root / "1"))
    assert gone.status == 404 and weights.name in gone.got
    for number, (config, field) in enumerate((({"r": 24}, "r"), ({"r": 3}, ".lora_A.weight")), 2):
        unservable = refusal(made, save_adapter(made.root / f"{number}", **config))
        assert unservable.status == 422 and unservable.field.endswith(field)
    assert made.engine.events == []


def refusal(made: Publishing, path: str, **more: Any) -> ServeError:
    """Of a publish; it names what was wrong, in all parts, and the next publish works."""
    with pytest.raises(ServeError) as refused:
        asyncio.run(asyncio.wait_for(made.load(path, **more), 60))
    error = refused.value
    assert 400 <= error.status < 500
    assert error.field and error.wanted and error.fix
    assert made.publisher.registry.load_count == 0
    return error


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        *(("version", {"version": version}) for version in (-1, HIGHEST_VERSION + 1, 2**63, 10**30)),
        *(("version", {"version": version, "adapter_name": f"policy-v{version}"}) for version in (-1, 2**53 + 1)),
        ("version", {"adapter_name": f"policy-v{HIGHEST_VERSION + 1}"}),
        *(
            ("adapter_name", {"adapter_name": name})
            for name in ("a\r\nb", "\0", "a\x7f", "\u2028", "\x1b[31m", "x" * 257)
        ),
    ],
)
def test_publish_of_a_version_or_name_that_is_none_is_refused(
    made: Publishing, field: str, asked: dict[str, Any]
) -> None:
    folder = save_adapter(made.root / "a")
    error = refusal(made, folder, **asked)
    assert error.field == field and error.got.isprintable() and len(error.got) < 300
    answer = asyncio.run(made.load(folder, adapter_name=f"policy-v{HIGHEST_VERSION}"))
    assert answer.policy_version == 2**53


@pytest.mark.parametrize("path", ["x" * 5000, "/".join(["y" * 200] * 30), "~nosuchuser/x", "a\0b", "circle", ""])
def test_publish_of_a_path_that_is_none_is_refused(made: Publishing, path: str) -> None:
    (made.root / "circle").symlink_to("circle")
    error = refusal(made, str(made.root / path) if path == "circle" else path)
    assert error.field == "adapter_path"
    assert len(error.got) < 5000 or error.status == 403
    (made.root / "link").symlink_to(os.fsdecode(b"\xff"))  # the refusal is text, the folder's name is none
    assert json_response(refusal(made, str(made.root / "link")).response()).body


def test_publish_from_outside_the_root_is_refused(made: Publishing, tmp_path: Path) -> None:
    outside = Path(save_adapter(tmp_path / "outside"))
    folder = Path(save_adapter(made.root / "a"))
    (made.root / "link").symlink_to(outside)
    for path in (outside, made.root / "link", made.root / "../outside"):
        error = refusal(made, str(path))
        assert error.status == 403 and "--lora-root" in error.fix
    for name in (CONFIG, WEIGHTS):
        (folder / name).rename(made.root / name)
        (folder / name).symlink_to(outside / name)
        assert refusal(made, str(folder)).status == 403
        (folder / name).unlink()
        (folder / name).symlink_to(Path("..") / name)  # within the root
    assert asyncio.run(made.load(str(folder))).adapter_path == str(folder)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "link-to-device"])
def test_publish_opens_regular_files_only(
    made: Publishing, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    folder = Path(save_adapter(made.root / "a"))
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
    error = refusal(made, str(folder))
    assert error.field == ("adapter_path" if kind == "link-to-device" else name)
    assert asyncio.run(made.load(save_adapter(made.root / "good"))).load_count == 1


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"r":' * 100_000, b"\xff\xfe", b"", b"null", b'{"r": 1' + b"0" * 5000 + b"}", b" " * (2 << 20)],
)
def test_publish_of_a_configuration_that_is_none_is_refused(made: Publishing, text: bytes) -> None:
    folder = Path(save_adapter(made.root / "a"))
    (folder / CONFIG).write_bytes(text)
    error = refusal(made, str(folder))
    assert error.field == CONFIG
    assert len(error.got) < 300


DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize("value", [DEEP, "x" * 10_000, 10**400, float("nan"), {"a": DEEP}, True])
@pytest.mark.parametrize("field", ["lora_alpha", "target_modules", "use_rslora", "r", "bias"])
def test_check_config_shows_fields_in_short(field: str, value: object) -> None:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], field: value}
    if (field, value) in (("use_rslora", True), ("r", True), ("target_modules", "x" * 10_000)):
        check_config(config, max_rank=8)
        return
    with refusing(ServeError, field) as refused:
        check_config(config, max_rank=8)
    assert len(refused.value.got) <= 200


def test_publish_answers_what_was_understood(made: Publishing) -> None:
    folder = save_adapter(made.root / "a", secret="private", use_rslora=True, note=[[[["deep"]]]])
    answer = asyncio.run(made.load(folder))
    assert answer.adapter_config == {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": True,
    }  # fmt: skip
