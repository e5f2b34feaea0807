"""Several environments at once, an environment's own state, and what `process` writes; the real rollout API."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from environments.api import wire
from environments.api.overview import Explainer
from environments.api.queue import RolloutQueue
from environments.api.service import Service
from environments.api.settings import Settings
from environments.base import BaseEnv
from environments.config import BaseEnvConfig
from environments.demo_model.model import build_tokenizer
from environments.items import Shuffled
from environments.running import cli
from environments.running.groups import EnvironmentFailed
from environments.running.groups_page import groups_page
from environments.running.pace import InFlight, Registration, groups_to_start
from environments.running.state import KEPT_BLINDLY, StateFiles
from environments.scoring import settled
from tests.stand_ins import local_api, registration, serving, trained

STEPS = 8


def trainer(folder: Path, starting_step: int = 0) -> wire.Register:
    return registration(16, checkpoint_dir=str(folder), starting_step=starting_step, num_steps=STEPS)


class Numbers(BaseEnv[int]):
    """Groups whose tokens are the item and the environment's mark."""

    name = "numbers"

    def __init__(self, mark: int = 0, seconds: float = 0.0, **changes: Any) -> None:
        settings = {"tokenizer_name": "m", "group_size": 2, "retry_timeout": 5.0} | changes
        super().__init__(BaseEnvConfig(**settings), None, build_tokenizer())  # type: ignore[arg-type]
        self.mark, self.seconds = mark, seconds
        self.items = Shuffled(range(1000), seed=0)
        self.taken: list[int] = []

    async def get_next_item(self) -> int:
        self.taken.append(next(self.items))
        return self.taken[-1]

    async def collect_trajectories(self, item: int) -> wire.ScoredData | None:
        await asyncio.sleep(self.seconds)
        row = [item, self.mark]
        return wire.ScoredData(tokens=[row, row], masks=[[-100, self.mark]] * 2, scores=[1.0, 0.0])

    async def evaluate(self) -> dict[str, float]:
        return {}


class Stuck(Numbers):
    """Its ninth item never comes, so it asks for the trainer's step once."""

    async def get_next_item(self) -> int:
        if len(self.taken) == 8:
            await asyncio.Event().wait()
        return await settled(super().get_next_item())


async def train(service: Service, steps: int) -> list[Counter[int]]:
    """How many groups of each mark each batch had."""
    return [Counter(group.tokens[0][1] for group in groups) for groups in await trained(service, steps)]


def test_batches_are_mixed_by_weight_however_fast_each_environment_is(tmp_path: Path) -> None:
    async def scene() -> list[Counter[int]]:
        service = Service(Settings())
        await service.register(trainer(tmp_path))
        await service.next_batch()
        slow, fast = Numbers(1, seconds=0.05, inference_weight=3.0), Numbers(2, inference_weight=1.0)
        async with local_api(service) as api:
            tasks = [asyncio.create_task(serving(env, api)) for env in (slow, fast)]
            mixtures = await train(service, STEPS)
            await asyncio.wait_for(asyncio.gather(*tasks), 20)
        return mixtures

    mixtures = asyncio.run(scene())
    assert all(mixture.total() == 8 for mixture in mixtures)
    # A weight of 3 to 1: six groups of eight. The first batch may have been begun before both were there.
    later = sum(mixtures[2:], Counter[int]())
    assert later[1] / later.total() == pytest.approx(0.75, abs=0.1), mixtures


@pytest.mark.parametrize(("batch", "sizes"), [(24, (8, 12)), (64, (16, 24)), (60, (12, 20)), (64, (8, 8))])
def test_environments_with_groups_of_several_sizes_fill_batches(batch: int, sizes: tuple[int, int]) -> None:
    """Two groups of 8 and one of 12 are each environment's part of 24 by its weight, and make no batch of 24."""
    queue = RolloutQueue()
    explainer = Explainer(queue)
    queue.register(registration(batch))
    queue.next_batch(0.0, 60.0)
    kinds = [
        wire.RegisterEnv(max_token_length=64, desired_name=str(size), weight=1.0, group_size=size) for size in sizes
    ]
    environments = [queue.register_environment(kind, 0.0) for kind in kinds]
    grants = most = 0
    for _ in range(100):
        for environment, size in zip(environments, sizes, strict=True):
            assert environment is not None
            seen = explainer.status_env(environment.id, seen="")
            own = Registration(environment.id, environment.name, batch_size=batch, max_token_len=-1, last_step=-1)
            if groups_to_start(seen, own, Numbers(group_size=size).config, InFlight()):
                queue.offer(environment.id, size, 10, 0.5)
        most = max(most, queue.sequences)
        if (grant := queue.next_batch(0.0, 60.0)) is not None:
            queue.acknowledge(grant.batch_id)
            grants += 1
    assert grants >= 20 and most <= 2 * batch


def test_a_resumed_run_goes_on_with_the_items_that_were_next(tmp_path: Path) -> None:
    async def run(starting_step: int, steps: int) -> Numbers:
        service = Service(Settings())
        await service.register(trainer(tmp_path, starting_step))
        await service.next_batch()
        env = Numbers(total_steps=starting_step + steps)
        task = asyncio.create_task(serving(env, service))
        await train(service, steps)
        await asyncio.wait_for(task, 20)
        return env

    first = asyncio.run(run(0, 4))
    saved = sorted(path.name for path in (tmp_path / "environments" / "numbers").iterdir())
    assert saved == ["step-3.json", "step-4.json"]  # as often as the trainer saves, and at the end
    again = asyncio.run(run(4, 2))
    assert not set(first.taken) & set(again.taken)
    order = Shuffled(range(1000), seed=0)
    assert first.taken + again.taken == [next(order) for _ in range(len(first.taken + again.taken))]
    afresh = asyncio.run(run(0, 2))
    assert afresh.taken == first.taken[: len(afresh.taken)]


def test_state_saved_at_the_end_is_of_the_step_that_the_trainer_has_reached_by_then(tmp_path: Path) -> None:
    async def scene() -> None:
        service, stop = Service(Settings()), asyncio.Event()
        await service.register(trainer(tmp_path))
        await service.next_batch()
        task = asyncio.create_task(serving(Stuck(), service, stop))
        await train(service, 1)
        stop.set()
        await asyncio.wait_for(task, 20)

    asyncio.run(scene())
    saved = tmp_path / "environments" / "numbers" / "step-1.json"
    assert json.loads(saved.read_text()) == {"position": 8}


def test_the_state_of_an_earlier_checkpoint_is_that_checkpoints(tmp_path: Path, caplog: Any) -> None:
    files = StateFiles(tmp_path, "a/b")
    assert files.newest(9) is None
    for step in (3, 6, 12):
        files.save(step, {"position": step * 10})
    assert files.newest(9) == {"position": 60} and files.newest(12) == {"position": 120} and files.newest(2) is None
    assert {path.name for path in tmp_path.iterdir()} == {"a_b"}
    (tmp_path / "file").write_text("")
    StateFiles(tmp_path / "file", "x").save(1, {"a": 1})
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.args[0] == 1 and str(tmp_path / "file") in warning.message and "--env.state_dir" in warning.message


def test_states_that_no_checkpoint_needs_are_deleted(tmp_path: Path) -> None:
    files = StateFiles(tmp_path / "environments", "numbers", tmp_path)
    for step in range(1, 5):
        files.save(step, {})
    for name in ("adapter_step_2", "step_4", "adapter_step_9"):
        (tmp_path / name).mkdir()
    for name in ("adapter_step_2", "step_4"):  # the third is not complete yet
        (tmp_path / name / "state.json").write_text("{}")
    files.save(6, {})
    left = {path.name for path in (tmp_path / "environments" / "numbers").iterdir()}
    assert left == {"step-2.json", "step-4.json", "step-6.json"}


def test_states_in_a_folder_of_their_own_are_deleted_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_40").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_40" / "state.json").write_text("{}")
    seen = StateFiles(tmp_path / "seen", "numbers", tmp_path / "checkpoints")
    blind = StateFiles(tmp_path / "blind", "numbers")
    for step in range(1, 42):
        seen.save(step, {})
    for step in range(1, KEPT_BLINDLY + 3):
        blind.save(step, {})
    assert {path.name for path in (tmp_path / "seen" / "numbers").iterdir()} == {"step-40.json", "step-41.json"}
    left = {path.name for path in (tmp_path / "blind" / "numbers").iterdir()}
    assert left == {f"step-{step}.json" for step in range(3, KEPT_BLINDLY + 3)}


class Requests(HTMLParser):
    """What a page would ask for when it is opened, and whether its tags are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        asks = [
            name for name, value in attrs if name in ("src", "href", "srcset", "data", "action") and value != "data:,"
        ]
        self.found += [(tag, name) for name in asks]
        self.open += [] if tag in ("meta", "br", "link") else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_of_groups_stands_alone_and_shows_them_as_they_are() -> None:
    talk = [{"role": "user", "content": "<script>alert(1)</script>"}, {"role": "assistant", "content": "one & two"}]
    group = wire.ScoredData(
        tokens=[[1, 2], [1, 3]],
        masks=[[-100, 2], [-100, 3]],
        scores=[0.25, 1.0],
        messages=[talk, [talk[0], {"role": "assistant", "content": "three"}]],
        policy_versions=[4, 4],
    )
    page = groups_page("sums: <a>", [group] * 3)
    read = Requests(page)
    assert not read.found and not read.open and "<script" not in page and "@import" not in page and "url(" not in page
    assert page.count("&lt;script&gt;alert(1)") == 6  # once as the title of each group, once as its prompt
    assert "one &amp; two" in page and page.index("three") < page.index("one &amp; two")  # the better answer first
    assert (
        "answers</small><b>6</b>" in page
        and "mean score</small><b>0.625</b>" in page
        and "1 of 2" in page
        and "policy 4" in page
    )
    Requests(groups_page("none", []))
    Requests(groups_page("no text", [msgspec.structs.replace(group, messages=None)]))


def test_process_keeps_groups_in_a_file_that_is_named_like_a_page(tmp_path: Path) -> None:
    path = tmp_path / "groups.html"
    asyncio.run(cli.process(Numbers(7, data_path_to_save_groups=path), 2))
    assert [len(json.loads(line)["tokens"]) for line in path.read_text().splitlines()] == [2, 2]
    assert "answers</small><b>4</b>" in (tmp_path / "groups.page.html").read_text()


def test_process_drops_groups_without_a_reward_as_serve_does(tmp_path: Path) -> None:
    class Rarely(Numbers):
        made = 0

        async def collect_trajectories(self, item: int) -> wire.ScoredData | None:
            self.made += 1
            number = self.made
            made = await super().collect_trajectories(item)
            assert made is not None
            if number in (41, 61):
                return made
            masks = [[wire.IGNORED] * len(mask) for mask in made.masks]
            return msgspec.structs.replace(made, masks=masks, overrides=[{"unscored": True}] * len(masks))

    env = Rarely(7, data_path_to_save_groups=tmp_path / "groups.jsonl", max_concurrent_groups=4)
    asyncio.run(cli.process(env, 2))
    assert len((tmp_path / "groups.jsonl").read_text().splitlines()) == 2
    again = Rarely(7, data_path_to_save_groups=tmp_path / "again.jsonl", max_concurrent_groups=4)
    with pytest.raises(EnvironmentFailed) as error:
        asyncio.run(cli.process(again, 3))
    assert "256 " in error.value.summary and again.made <= 61 + 256 + 4
