"""Publishing on a stand-in engine: order of events, room, a publish that fails half-way, what a request may hold."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Coroutine
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


def make_publisher(root: Path, *, keep: int = 2, capacity: int = 3, timeout: float = 5.0) -> Publisher:
    held = PolicyRegistry(served_name="base", lora_name="policy", keep=keep, capacity=capacity)
    nothing: Any = None
    channels = Channels(nothing, Fence("boot", nothing, on_version=lambda _: None), accepts=False, max_rank=8)
    engine: Any = StandInEngine()
    return Publisher(held, engine, channels, (root.resolve(),), room_timeout_s=timeout)


def engine_of(publisher: Publisher) -> StandInEngine:
    assert isinstance(publisher.engine, StandInEngine)
    return publisher.engine


def save_adapter(folder: Path, **config: Any) -> str:
    folder.mkdir(parents=True)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": torch.ones(RANK, 6), f"{module}.lora_B.weight": torch.ones(6, RANK)}
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]} | config)
    )
    return str(folder)


def load(publisher: Publisher, path: str, **more: Any) -> Coroutine[Any, Any, Any]:
    return publisher.load(LoraLoadRequest(adapter_path=path, **more))


class Publishing:
    """A publisher, and a root with adapters named 1, 2 and so on."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.publisher = make_publisher(root, **options)
        self.serving = self.publisher.serving

    def load(self, number: int, **more: Any) -> Coroutine[Any, Any, Any]:
        folder = self.root / f"{number}"
        return load(self.publisher, str(folder) if folder.exists() else save_adapter(folder), **more)

    @property
    def engine(self) -> StandInEngine:
        return engine_of(self.publisher)

    @property
    def events(self) -> list[str]:
        return self.engine.events

    @property
    def newest(self) -> str:
        return self.publisher.registry.newest.name


def publishing(**options: Any) -> Callable[[Callable[[Publishing], Coroutine[Any, Any, None]]], Callable[[Path], None]]:
    """A test that is a coroutine, of a publisher with these options."""

    def test_of(told: Callable[[Publishing], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
        return lambda tmp_path: asyncio.run(told(Publishing(tmp_path, **options)))

    return test_of


@publishing()
async def test_publisher_answers_a_repeated_request_with_its_first_answer(made: Publishing) -> None:
    first, again = await asyncio.gather(*(made.load(1, adapter_name="policy-v1", request_id="r") for _ in range(2)))
    assert first == again and first.load_count == 1
    with refusing(ServeError, "adapter_name", got="policy-v1"):
        await made.load(1, adapter_name="policy-v1", request_id="another")
    assert made.events == ["add policy-v1"]


@publishing(keep=1, capacity=2)
async def test_publisher_waits_for_a_place_that_requests_hold(made: Publishing) -> None:
    await made.load(1)
    with made.serving():
        await made.load(2)
        third = asyncio.create_task(made.load(3))
        await asyncio.sleep(0.05)
        assert not third.done()  # version 1 is being used, version 2 is the newest: no place
    assert (await third).policy_version == 3
    assert made.events.index("remove policy-v1") < made.events.index("add policy-v3")


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
    slow: Any = SlowEngine()
    made.publisher.engine = engine = slow
    with ExitStack() as running:
        for number in (1, 2, 3, 4):
            await made.load(number)
            running.enter_context(made.serving())
    for number in (5, 6, 7):  # the first three are on their way out of the engine, one after the other
        assert (await made.load(number)).policy_version == number
    while engine.held != {"policy-v7"}:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("kind", "field"), [("disk", "adapter_path"), ("memory", "body")])
def test_publisher_names_the_part_of_the_request_that_the_engine_refuses(tmp_path: Path, kind: str, field: str) -> None:
    publisher = make_publisher(tmp_path)
    engine_of(publisher).fails = {"add policy-v1"}
    folder = save_adapter(tmp_path / "1")
    body = tmp_path / "body"
    save_file(load_file(Path(folder) / WEIGHTS), body, {"adapter_config": (Path(folder) / CONFIG).read_text()})
    with refusing(ServeError, field):
        asyncio.run(load(publisher, folder) if kind == "disk" else publisher.load(LoraLoadRequest(), str(body)))


@publishing(keep=1, capacity=2, timeout=0.05)
async def test_publisher_refuses_when_no_place_comes_free(made: Publishing) -> None:
    await made.load(1)
    with made.serving():
        await made.load(2)
        with pytest.raises(ServeError) as refused:
            await made.load(3)
        assert refused.value.status == 503 and "--max-loras" in refused.value.fix
        assert made.newest == "policy-v2"


@publishing()
async def test_publisher_serves_the_old_version_after_a_load_that_failed(made: Publishing) -> None:
    await made.load(1)
    made.engine.fails = {"add policy-v2"}
    with pytest.raises(ServeError) as refused:
        await made.load(2)
    assert refused.value.status == 422 and "add policy-v2" in refused.value.got
    assert made.events[-1] == "remove policy-v2"  # what the engine may have kept of it
    with made.serving() as version:
        assert version.name == "policy-v1"


@publishing()
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


@publishing()
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
    assert sorted(event for event in made.events if "remove" in event) == ["remove policy-v1", "remove policy-v2"]


def test_publish_tells_missing_damaged_and_unservable_adapters_apart(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)
    assert refusal(publisher, str(tmp_path / "nothing")).status == 404
    weights = Path(save_adapter(tmp_path / "1")) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    damaged, size = refusal(publisher, str(tmp_path / "1")), weights.stat().st_size
    assert (damaged.status, damaged.field) == (422, weights.name) and f"{size} of {size + 1} bytes" in damaged.got
    weights.unlink()
    gone = refusal(publisher, str(tmp_path / "1"))
    assert gone.status == 404 and weights.name in gone.got
    for number, (config, field) in enumerate((({"r": 24}, "r"), ({"r": 3}, ".lora_A.weight")), 2):
        unservable = refusal(publisher, save_adapter(tmp_path / f"{number}", **config))
        assert unservable.status == 422 and unservable.field.endswith(field)
    assert engine_of(publisher).events == []


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
    publisher: Publisher, root: Path, field: str, asked: dict[str, Any]
) -> None:
    folder = save_adapter(root / "a")
    error = refusal(publisher, folder, **asked)
    assert error.field == field and error.got.isprintable() and len(error.got) < 300
    answer = asyncio.run(load(publisher, folder, adapter_name=f"policy-v{HIGHEST_VERSION}"))
    assert answer.policy_version == 2**53


@pytest.mark.parametrize("path", ["x" * 5000, "/".join(["y" * 200] * 30), "~nosuchuser/x", "a\0b", "circle", ""])
def test_publish_of_a_path_that_is_none_is_refused(publisher: Publisher, root: Path, path: str) -> None:
    (root / "circle").symlink_to("circle")
    error = refusal(publisher, str(root / path) if path == "circle" else path)
    assert error.field == "adapter_path"
    assert len(error.got) < 5000 or error.status == 403
    (root / "link").symlink_to(os.fsdecode(b"\xff"))  # the refusal is text, the folder's name is none
    assert json_response(refusal(publisher, str(root / "link")).response()).body


def test_publish_from_outside_the_root_is_refused(publisher: Publisher, root: Path, tmp_path: Path) -> None:
    outside = Path(save_adapter(tmp_path / "outside"))
    folder = Path(save_adapter(root / "a"))
    (root / "link").symlink_to(outside)
    for path in (outside, root / "link", root / "../outside"):
        error = refusal(publisher, str(path))
        assert error.status == 403 and "--lora-root" in error.fix
    for name in (CONFIG, WEIGHTS):
        (folder / name).rename(root / name)
        (folder / name).symlink_to(outside / name)
        assert refusal(publisher, str(folder)).status == 403
        (folder / name).unlink()
        (folder / name).symlink_to(Path("..") / name)  # within the root
    assert asyncio.run(load(publisher, str(folder))).adapter_path == str(folder)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "link-to-device"])
def test_publish_opens_regular_files_only(
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
def test_publish_of_a_configuration_that_is_none_is_refused(publisher: Publisher, root: Path, text: bytes) -> None:
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
def test_check_config_shows_fields_in_short(field: str, value: object) -> None:
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], field: value}
    if (field, value) in (("use_rslora", True), ("r", True), ("target_modules", "x" * 10_000)):
        check_config(config, max_rank=8)
        return
    with refusing(ServeError, field) as refused:
        check_config(config, max_rank=8)
    assert len(refused.value.got) <= 200


def test_publish_answers_what_was_understood(publisher: Publisher, root: Path) -> None:
    folder = save_adapter(root / "a", secret="private", use_rslora=True, note=[[[["deep"]]]])
    answer = asyncio.run(load(publisher, folder))
    assert answer.adapter_config == {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": True,
    }  # fmt: skip
