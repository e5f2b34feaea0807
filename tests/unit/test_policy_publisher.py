"""Publishing on a stand-in engine: order of events, room, refusals, and a publish that fails half-way."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_server.errors import ServeError, not_finite
from vllm_server.policy import PolicyRegistry
from vllm_server.protocol import ChannelRequest, LoraLoadRequest, LoraUnloadRequest
from vllm_server.publisher import Delivery, Installed, Publisher

RANK = 4


class StandInEngine:
    """Remembers what it was asked; `fails` names the calls that raise."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.fails: set[str] = set()
        self.opened: list[str] = []

    def next_id(self) -> int:
        return len(self.events) + 1

    async def add(self, name: str, adapter_id: int, delivery: Delivery) -> Installed:
        self._event(f"add {name}")
        return Installed(slot=len(self.events), replayed=False, stall_seconds=0.0)

    async def open_channel(self, name: str, request: ChannelRequest) -> None:
        self._event("open")
        self.opened.append(name)

    async def close_channel(self, name: str) -> None:
        self._event("close")
        self.opened.remove(name)

    async def remove(self, name: str, adapter_id: int) -> None:
        self._event(f"remove {name}")

    def _event(self, event: str) -> None:
        self.events.append(event)
        if event in self.fails:
            raise RuntimeError(f"no {event}")


def make_publisher(root: Path, *, keep: int = 2, capacity: int = 3, timeout: float = 5.0) -> Publisher:
    held = PolicyRegistry(served_name="base", lora_name="policy", keep=keep, capacity=capacity)
    return Publisher(held, StandInEngine(), (root.resolve(),), max_rank=8, room_timeout_s=timeout)


def events(publisher: Publisher) -> list[str]:
    assert isinstance(publisher.engine, StandInEngine)
    return publisher.engine.events


def save_adapter(folder: Path, **config: Any) -> str:
    folder.mkdir(parents=True)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": torch.ones(RANK, 6), f"{module}.lora_B.weight": torch.ones(6, RANK)}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]} | config)
    )
    return str(folder)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def load(publisher: Publisher, path: str, **more: Any) -> Coroutine[Any, Any, Any]:
    return publisher.load(LoraLoadRequest(adapter_path=path, **more))


def test_a_publish_loads_routes_and_lets_the_oldest_go(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)

    async def story() -> None:
        for number in (1, 2, 3):
            answer = await load(publisher, save_adapter(tmp_path / f"{number}"))
            assert (answer.adapter_name, answer.policy_version) == (f"policy-v{number}", number)
        assert answer.unloaded == ["policy-v1"]
        assert answer.load_count == 3
        assert publisher.registry.newest.name == "policy-v3"

    run(story())
    assert events(publisher) == ["add policy-v1", "add policy-v2", "add policy-v3", "remove policy-v1"]


def test_a_publish_that_is_sent_again_gets_the_first_answer_and_loads_nothing(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)
    folder = save_adapter(tmp_path / "1")

    async def story() -> None:
        both = [load(publisher, folder, adapter_name="policy-v1", request_id="r") for _ in range(2)]
        first, again = await asyncio.gather(*both)
        assert first == again and first.load_count == 1
        with pytest.raises(ServeError) as refused:
            await load(publisher, folder, adapter_name="policy-v1", request_id="another")
        assert (refused.value.field, refused.value.got) == ("adapter_name", "policy-v1")

    run(story())
    assert events(publisher) == ["add policy-v1"]


def test_a_version_leaves_the_engine_with_its_last_request(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path, keep=1)

    async def story() -> None:
        await load(publisher, save_adapter(tmp_path / "1"))
        with publisher.serving() as version:
            assert version.name == "policy-v1"
            answer = await load(publisher, save_adapter(tmp_path / "2"))
            assert answer.unloaded == []
            with publisher.serving() as newer:
                assert newer.name == "policy-v2"
            await asyncio.sleep(0)  # sweeps run as tasks: this one is the publish's
            assert events(publisher)[-1] == "add policy-v2"
        await asyncio.sleep(0)
        assert events(publisher)[-1] == "remove policy-v1"

    run(story())


def test_a_publish_waits_for_a_place_that_requests_hold(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path, keep=1, capacity=2)

    async def story() -> None:
        await load(publisher, save_adapter(tmp_path / "1"))
        running = publisher.serving()
        running.__enter__()
        await load(publisher, save_adapter(tmp_path / "2"))
        third = asyncio.create_task(load(publisher, save_adapter(tmp_path / "3")))
        await asyncio.sleep(0.05)
        assert not third.done()  # version 1 is being used, version 2 is the newest: no place
        running.__exit__(None, None, None)
        assert (await third).policy_version == 3

    run(story())
    assert events(publisher).index("remove policy-v1") < events(publisher).index("add policy-v3")


class SlowEngine(StandInEngine):
    """Has as many slots as it says, and takes its time to free one."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.held: set[str] = set()

    async def add(self, name: str, adapter_id: int, delivery: Delivery) -> Installed:
        assert len(self.held) < self.slots, "all slots are taken"
        self.held.add(name)
        return await super().add(name, adapter_id, delivery)

    async def remove(self, name: str, adapter_id: int) -> None:
        await asyncio.sleep(0.02)
        self.held.remove(name)
        await super().remove(name, adapter_id)


def test_a_publish_waits_for_slots_that_are_being_freed(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path, keep=1, capacity=4)
    publisher.engine = SlowEngine(4)

    async def story() -> None:
        with ExitStack() as running:
            for number in (1, 2, 3, 4):
                await load(publisher, save_adapter(tmp_path / f"{number}"))
                running.enter_context(publisher.serving())
        for number in (5, 6, 7):  # the first three are on their way out of the engine, one after the other
            answer = await load(publisher, save_adapter(tmp_path / f"{number}"))
            assert answer.policy_version == number
        while publisher.engine.held != {"policy-v7"}:  # pyright: ignore[reportAttributeAccessIssue]
            await asyncio.sleep(0.01)

    run(story())


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_refusal_of_the_engine_is_about_the_part_of_the_request_that_named_the_adapter(
    tmp_path: Path, kind: str
) -> None:
    publisher = make_publisher(tmp_path)
    publisher.engine.fails = {"add policy-v1"}  # pyright: ignore[reportAttributeAccessIssue]
    folder = save_adapter(tmp_path / "1")
    body = tmp_path / "body"
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    save_file(tensors, body, {"adapter_config": (Path(folder) / "adapter_config.json").read_text()})
    with pytest.raises(ServeError) as refused:
        if kind == "disk":
            asyncio.run(load(publisher, folder))
        else:
            asyncio.run(publisher.load(LoraLoadRequest(), str(body)))
    assert refused.value.field == {"disk": "adapter_path", "memory": "body"}[kind]


def test_a_place_that_never_comes_free_is_an_error_that_says_so(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path, keep=1, capacity=2, timeout=0.05)

    async def story() -> None:
        await load(publisher, save_adapter(tmp_path / "1"))
        with publisher.serving():
            await load(publisher, save_adapter(tmp_path / "2"))
            with pytest.raises(ServeError) as refused:
                await load(publisher, save_adapter(tmp_path / "3"))
            assert refused.value.status == 503 and "--max-loras" in refused.value.fix
            assert publisher.registry.newest.name == "policy-v2"

    run(story())


def test_a_load_that_fails_leaves_the_old_version_serving(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)

    async def story() -> None:
        await load(publisher, save_adapter(tmp_path / "1"))
        publisher.engine.fails = {"add policy-v2"}  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ServeError) as refused:
            await load(publisher, save_adapter(tmp_path / "2"))
        assert refused.value.status == 422 and "add policy-v2" in refused.value.got
        assert events(publisher)[-1] == "remove policy-v2"  # what the engine may have kept of it
        with publisher.serving() as version:
            assert version.name == "policy-v1"

    run(story())


def test_a_publish_that_fails_half_way_stops_generation_until_one_succeeds(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)

    async def story() -> None:
        publisher.engine.fails = {"add policy-v1", "remove policy-v1"}  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ServeError) as refused:
            await load(publisher, save_adapter(tmp_path / "1"))
        assert refused.value.status == 503
        with pytest.raises(ServeError) as half_way, publisher.serving():
            pass
        assert (half_way.value.status, half_way.value.field) == (503, "policy")
        assert "add policy-v1" in half_way.value.got and "remove policy-v1" in half_way.value.got
        await load(publisher, save_adapter(tmp_path / "2"), version=2)
        with publisher.serving() as version:
            assert version.name == "policy-v2"

    run(story())


def test_an_adapter_that_is_not_finite_is_refused_in_the_engines_words_and_changes_nothing(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)

    class Strict(StandInEngine):
        async def add(self, name: str, adapter_id: int, delivery: Delivery) -> Installed:
            if delivery.origin.endswith("2"):
                raise not_finite("q.lora_B.weight", "nan")
            return await super().add(name, adapter_id, delivery)

    publisher.engine = Strict()

    async def story() -> None:
        await load(publisher, save_adapter(tmp_path / "1"))
        with pytest.raises(ServeError) as refused:
            await load(publisher, save_adapter(tmp_path / "2"))
        assert (refused.value.status, refused.value.field, refused.value.got) == (422, "q.lora_B.weight", "nan")
        assert publisher.registry.newest.name == "policy-v1" and publisher.fault is None
        assert (await load(publisher, save_adapter(tmp_path / "3"))).policy_version == 2

    run(story())
    assert [version.name for version in publisher.registry.versions] == ["policy-v1", "policy-v2"]


def test_unload_withdraws_now_or_when_idle(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)

    async def story() -> None:
        await load(publisher, save_adapter(tmp_path / "1"))
        await load(publisher, save_adapter(tmp_path / "2"))
        with publisher.serving():
            gone = await publisher.unload(LoraUnloadRequest())
            assert (gone.status, gone.previous_name, gone.policy_version) == ("draining", "policy-v2", 1)
        gone = await publisher.unload(LoraUnloadRequest(adapter_name="policy-v1"))
        assert (gone.status, gone.previous_name, gone.policy_version) == ("success", "policy-v1", 0)
        gone = await publisher.unload(LoraUnloadRequest())
        assert (gone.status, gone.previous_name) == ("success", None)

    run(story())
    assert sorted(e for e in events(publisher) if e.startswith("remove")) == [
        "remove policy-v1",
        "remove policy-v2",
    ]


@pytest.mark.parametrize(
    ("config", "field", "got", "wanted"),
    [
        ({"r": 24}, "r", "24", "1 to 8"),
        ({"peft_type": "IA3"}, "peft_type", '"IA3"', '"LORA"'),
        ({"use_dora": True}, "use_dora", "true", "false"),
        ({"bias": "all"}, "bias", '"all"', '"none"'),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save", '["lm_head"]', "null"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern", '{"q_proj": 2}', "null"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights", '"pissa"', "true"),
        ({"r": 3}, ".lora_A.weight", "shape [4, 6]", "rank 3"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_before_the_engine_sees_it(
    tmp_path: Path, config: dict[str, Any], field: str, got: str, wanted: str
) -> None:
    publisher = make_publisher(tmp_path)
    with pytest.raises(ServeError) as refused:
        asyncio.run(load(publisher, save_adapter(tmp_path / "1", **config)))
    assert (refused.value.status, refused.value.got) == (422, got)
    assert refused.value.field.endswith(field) and refused.value.wanted.startswith(wanted)
    assert events(publisher) == []


def test_a_path_outside_the_roots_is_refused_also_behind_a_link(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path / "root")
    outside = save_adapter(tmp_path / "outside")
    (tmp_path / "root").mkdir()
    (tmp_path / "root/link").symlink_to(outside)
    for path in (outside, str(tmp_path / "root/link"), str(tmp_path / "root/../outside")):
        with pytest.raises(ServeError) as refused:
            asyncio.run(load(publisher, path))
        assert refused.value.status == 403 and "--lora-root" in refused.value.fix


def test_missing_and_damaged_files_are_told_apart(tmp_path: Path) -> None:
    publisher = make_publisher(tmp_path)
    with pytest.raises(ServeError) as missing:
        asyncio.run(load(publisher, str(tmp_path / "nothing")))
    assert missing.value.status == 404
    weights = Path(save_adapter(tmp_path / "1")) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ServeError) as damaged:
        asyncio.run(load(publisher, str(tmp_path / "1")))
    size = weights.stat().st_size
    assert (damaged.value.status, damaged.value.field) == (422, weights.name)
    assert f"{size} of {size + 1} bytes" in damaged.value.got
    weights.unlink()
    with pytest.raises(ServeError) as gone:
        asyncio.run(load(publisher, str(tmp_path / "1")))
    assert gone.value.status == 404 and weights.name in gone.value.got
