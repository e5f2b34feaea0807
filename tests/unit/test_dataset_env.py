"""The environment of a data set: prompts, groups, held-out rows, order; a server that answers from a script."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from environments.api import wire
from environments.base import Measures
from environments.config import ConfigError, UnusableRow
from environments.data_config import DataConfig, RewardConfig
from environments.dataset import data as reading
from environments.dataset.env import DatasetConfig, DatasetEnv
from environments.demo_model.model import build_tokenizer
from environments.peers.http import PeerGone
from environments.peers.inference import Completion, Sampling
from environments.running import evaluation
from environments.running.cli import process
from environments.running.data_record import keep
from environments.running.evaluation import mean_with_interval
from environments.running.groups import ALL_UNSCORED, EnvironmentFailed, unfit
from environments.scoring import settled
from tests.stand_ins import Scripted

END = "<|endoftext|>"
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]
RIGHT = "def right(completions, answer, **kwargs):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
LENGTH = "def length(completions):\n    return [len(c) for c in completions]\n"
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<>{% endif %}"


@pytest.fixture
def tokenizer() -> Qwen2Tokenizer:
    return build_tokenizer()


def written(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def environment(
    tokenizer: Qwen2Tokenizer,
    data: Path,
    rewards: Sequence[Any],
    answers: Sequence[str] = ("1" + END, "2" + END),
    *,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> DatasetEnv:
    config = DatasetConfig(**({"tokenizer_name": "demo", "group_size": len(answers)} | changes))
    env = DatasetEnv(config, Scripted(tokenizer, lambda _: answers), tokenizer)
    env.data = DataConfig(path=str(data), **(options or {}))
    env.rewards = tuple(map(RewardConfig.model_validate, rewards))
    return env


async def first_group(env: DatasetEnv) -> wire.ScoredData:
    try:
        await env.setup()
        item = await settled(env.get_next_item())
        assert item is not None
        group = await env.collect_trajectories(item)
        assert group is not None
        return group
    finally:
        await env.close()


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    (tmp_path / "my.py").write_text(RIGHT + LENGTH)
    return str(tmp_path / "my.py")


def test_rows_become_groups_with_weighted_rewards_and_their_metrics(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str
) -> None:
    data = written(tmp_path / "rows.jsonl", ROWS[:1])  # 0+1=, 1
    env = environment(tokenizer, data, [f"{rewards}:right", f"{rewards}:length=0.1"], ["1" + END, "22" + END])
    group = asyncio.run(first_group(env))
    assert group.scores == pytest.approx([1.1, 0.2])
    assert group.messages is not None and group.messages[0] == [
        {"role": "user", "content": "0+1="},
        {"role": "assistant", "content": "1"},
    ]
    assert env.measures.take() == {"reward_right": 0.5, "reward_length": 1.5}


def test_a_sample_to_which_no_reward_applies_is_marked_and_not_trained_on(
    tmp_path: Path, tokenizer: Qwen2Tokenizer
) -> None:
    (tmp_path / "some.py").write_text(
        "def some(completions):\n    return [None if c == '1' else 2.0 for c in completions]\n"
    )
    data = written(tmp_path / "rows.jsonl", ROWS)
    group = asyncio.run(first_group(environment(tokenizer, data, [f"{tmp_path}/some.py:some"])))
    assert group.overrides == [{"unscored": True}, {}]
    assert set(group.masks[0]) == {wire.IGNORED} and set(group.masks[1]) != {wire.IGNORED}
    assert wire.counted_scores(group) == [2.0]


def test_a_reward_that_does_not_apply_leaves_the_others(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str
) -> None:
    (tmp_path / "never.py").write_text("def never(completions):\n    return [None] * len(completions)\n")
    data = written(tmp_path / "rows.jsonl", ROWS[:1])
    env = environment(tokenizer, data, [f"{tmp_path}/never.py:never=5", f"{rewards}:right"])
    assert asyncio.run(first_group(env)).scores == [1.0, 0.0]
    assert env.measures.take() == {"reward_right": 0.5}


def test_a_group_to_which_no_reward_applies_is_dropped(tmp_path: Path, tokenizer: Qwen2Tokenizer) -> None:
    (tmp_path / "never.py").write_text("def never(completions):\n    return [None] * len(completions)\n")
    env = environment(tokenizer, written(tmp_path / "rows.jsonl", ROWS), [f"{tmp_path}/never.py:never"])
    assert unfit(asyncio.run(first_group(env)), env.config, max_token_len=-1) == ALL_UNSCORED


def test_held_out_rows_are_the_same_for_every_seed_and_never_trained_on(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str
) -> None:
    data = written(tmp_path / "rows.jsonl", ROWS)

    async def scene(seed: int) -> tuple[set[int], list[int]]:
        env = environment(tokenizer, data, [f"{rewards}:right"], options={"held_out": 5}, seed=seed)
        await env.setup()
        return set(env._held_out), [next(env.items) for _ in range(30)]

    first, second = (asyncio.run(scene(seed)) for seed in (0, 1))
    assert first[0] == second[0] and len(first[0]) == 5
    assert sorted(first[1][:15]) == sorted(set(range(20)) - first[0])  # each row once before any comes again
    assert first[1] != second[1] and sorted(first[1][15:]) == sorted(first[1][:15])


def test_evaluation_scores_held_out_rows_with_the_same_rewards_and_intervals(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str
) -> None:
    train, held_out = written(tmp_path / "rows.jsonl", ROWS), written(tmp_path / "test.jsonl", ROWS[:4])
    env = environment(
        tokenizer, train, [f"{rewards}:right", f"{rewards}:length=0.5"], ["1" + END],
        options={"held_out_split": str(held_out)},
    )  # fmt: skip

    async def scene() -> dict[str, float]:
        await env.setup()
        return await env.evaluate()

    metrics = asyncio.run(scene())
    # The answer 1 is right for 0+1= alone: rewards 1.5, 0.5, 0.5, 0.5, of mean 0.75 and standard deviation 0.5.
    assert metrics["reward"] == 0.75 and metrics["reward_right"] == 0.25 and metrics["reward_length"] == 1.0
    assert metrics["reward_high"] - metrics["reward"] == pytest.approx(1.96 * 0.5 / 2, abs=1e-3)
    assert metrics["rows"] == 4 and env.measures.take() == {}


HANGS_OR_RAISES = """
import asyncio

async def judged(completions, prompt, **kwargs):
    if prompt[0] == "3+1=":
        await asyncio.Event().wait()
    if prompt[0] == "5+1=":
        raise KeyError("no judge")
    return [1.0] * len(completions)
"""


def test_an_evaluation_counts_rows_that_hang_raise_or_are_too_long_and_scores_the_others(
    tmp_path: Path, tokenizer: Qwen2Tokenizer
) -> None:
    (tmp_path / "judged.py").write_text(HANGS_OR_RAISES)
    held_out = written(tmp_path / "test.jsonl", [*ROWS[:10], {"prompt": "1" * 70, "answer": "1"}])
    env = environment(
        tokenizer, written(tmp_path / "rows.jsonl", ROWS), [f"{tmp_path}/judged.py:judged"], ["1" + END],
        options={"held_out_split": str(held_out)}, score_timeout=0.2, max_token_length=64,
    )  # fmt: skip

    async def scene() -> dict[str, float]:
        await env.setup()
        env._held_out = range(11)  # large data is not checked before the start
        return await env.evaluate()

    metrics = asyncio.run(asyncio.wait_for(scene(), 60))
    assert metrics["reward"] == 1.0 and metrics["rows"] == 8 and metrics["rows_failed"] == 3


def test_an_evaluation_without_a_row_that_can_be_scored_fails_and_names_the_error(
    tmp_path: Path, tokenizer: Qwen2Tokenizer
) -> None:
    (tmp_path / "broken.py").write_text("def broken(completions):\n    raise KeyError('no judge')\n")
    env = environment(tokenizer, written(tmp_path / "rows.jsonl", ROWS), [f"{tmp_path}/broken.py:broken"])

    async def scene() -> dict[str, float]:
        await env.setup()
        return await env.evaluate()

    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(scene())
    assert "no judge" in caught.value.got


def test_an_evaluation_ends_with_the_server_and_has_a_limited_number_of_rows_in_flight(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "AT_ONCE", 3)
    env = environment(tokenizer, written(tmp_path / "rows.jsonl", ROWS), [f"{rewards}:right"])
    asked: list[list[int]] = []

    class Gone(Scripted):
        async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
            asked.append(prompt_token_ids)
            await asyncio.sleep(0)
            if len(asked) == 3:
                raise PeerGone("no answer", field="the server")
            await asyncio.Event().wait()
            return []

    env.server = Gone(tokenizer, lambda _: ["1" + END])

    async def scene() -> None:
        await env.setup()
        await env.evaluate()

    with pytest.raises(PeerGone):
        asyncio.run(asyncio.wait_for(scene(), 60))
    assert len(asked) == 3


def test_without_held_out_rows_all_are_evaluated_but_none_of_those_that_are_trained_on(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str
) -> None:
    env = environment(tokenizer, written(tmp_path / "rows.jsonl", ROWS), [f"{rewards}:right"])

    async def scene() -> tuple[dict[str, float], dict[str, float]]:
        await env.setup()
        alone = await env.evaluate()
        env.curr_step = 3
        return alone, await env.evaluate()

    alone, in_a_run = asyncio.run(scene())
    assert alone["rows"] == 20 and alone["reward"] == 0.05  # 1 is the answer to 0+1= alone
    assert in_a_run == {}


@pytest.mark.parametrize("count", [20, 25])
def test_not_all_rows_can_be_held_out(tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str, count: int) -> None:
    data = written(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError) as caught:
        asked(environment(tokenizer, data, [f"{rewards}:right"], options={"held_out": count}))
    assert caught.value.field == "--data.held_out"


def test_held_out_rows_do_not_depend_on_which_prompts_fit(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str
) -> None:
    rows = [{"prompt": "1" * (10 + 3 * number), "answer": "1"} for number in range(20)]
    data = written(tmp_path / "rows.jsonl", rows)

    async def held_out(longest: int) -> set[int]:
        env = environment(tokenizer, data, [f"{rewards}:right"], options={"held_out": 10}, max_token_length=longest)
        await env.setup()
        return set(env._held_out)

    few, many = (asyncio.run(held_out(longest)) for longest in (50, 80))
    assert 0 < len(few) < len(many) == 10 and few < many


def test_intervals_of_shares_are_wilsons_and_of_other_values_normal() -> None:
    assert mean_with_interval("x", [1.0, 1.0])["x_high"] == 1.0
    assert mean_with_interval("x", [1.0, 1.0])["x_low"] == pytest.approx(0.342, abs=1e-3)  # 2 / (2 + 1.96²)
    found = mean_with_interval("x", [0.0, 2.0])  # standard deviation √2: half = 1.96 · √2 / √2
    assert [found["x"], found["x_low"], found["x_high"]] == pytest.approx([1.0, -0.96, 2.96], abs=1e-3)


# ---------------------------------------------------------------- prompts


def asked(env: DatasetEnv, item: int = 0) -> Any:
    async def scene() -> Any:
        await env.setup()
        return env.prompt(item)

    return asyncio.run(scene())


def test_text_is_sent_as_it_is_to_a_model_without_a_chat_template(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str
) -> None:
    tokenizer.chat_template = None
    data = written(tmp_path / "rows.jsonl", ROWS)
    assert asked(environment(tokenizer, data, [f"{rewards}:right"])) == "0+1="


@pytest.mark.parametrize(("chat", "is_chat"), [("auto", True), ("on", True), ("off", False)])
def test_text_becomes_a_user_message_where_the_model_has_a_chat_template(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str, chat: str, is_chat: bool
) -> None:
    tokenizer.chat_template = CHAT
    data = written(tmp_path / "rows.jsonl", ROWS)
    env = environment(tokenizer, data, [f"{rewards}:right"], options={"chat": chat})
    assert asked(env) == ([{"role": "user", "content": "0+1="}] if is_chat else "0+1=")
    # Functions get the answers in the form of the data set's prompts.
    assert asyncio.run(first_group(env)).scores in ([1.0, 0.0], [0.0, 1.0], [0.0, 0.0])


def test_prompts_with_special_tokens_are_not_put_into_the_template_again(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str
) -> None:
    tokenizer.chat_template = CHAT
    data = written(tmp_path / "rows.jsonl", [{"prompt": f"{END}1+1=", "answer": "2"}])
    assert asked(environment(tokenizer, data, [f"{rewards}:right"])) == f"{END}1+1="


def test_one_prompt_with_a_special_token_does_not_send_the_others_as_plain_text(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.chat_template = CHAT
    data = written(tmp_path / "rows.jsonl", [*ROWS[:3], {"prompt": f"What is {END}?", "answer": "2"}])
    assert asked(environment(tokenizer, data, [f"{rewards}:right"])) == [{"role": "user", "content": "0+1="}]
    assert f"{data}, line 4" in caplog.text and END in caplog.text


@pytest.mark.parametrize(("chat", "mark"), [("off", ""), ("auto", END)])
def test_a_system_prompt_is_refused_where_prompts_are_sent_as_plain_text(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str, chat: str, mark: str
) -> None:
    tokenizer.chat_template = CHAT
    data = written(tmp_path / "rows.jsonl", [{"prompt": f"{mark}1+1=", "answer": "2"}])
    env = environment(tokenizer, data, [f"{rewards}:right"], options={"chat": chat}, system_prompt="Be brief.")
    with pytest.raises(ConfigError) as caught:
        asked(env)
    assert caught.value.field == "--env.system_prompt"


def test_prompts_that_are_both_trained_on_and_held_out_are_counted(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str, caplog: pytest.LogCaptureFixture
) -> None:
    new = [{"prompt": "5+5=", "answer": "10"}]
    data, other = written(tmp_path / "rows.jsonl", ROWS), written(tmp_path / "test.jsonl", [*ROWS[:3], *new])
    asked(environment(tokenizer, data, [f"{rewards}:right"], options={"held_out": 4}))
    assert not [record for record in caplog.records if "held-out" in record.getMessage()]
    asked(environment(tokenizer, data, [f"{rewards}:right"], options={"held_out_split": str(other)}))
    (warning,) = [record.getMessage() for record in caplog.records if "held-out" in record.getMessage()]
    assert re.findall(r"\d+", warning)[:2] == ["3", "4"]


def test_metrics_that_are_not_finite_or_have_names_of_the_environments_own_are_left_out_and_said_once(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs.py").write_text(
        "def logs(completions, log_metric, **kwargs):\n"
        "    for name in ('reward_logs', 'rows', 'fine'):\n"
        "        log_metric(name, 7)\n"
        "    log_metric('bad', float('inf'))\n"
        "    return [1.0] * len(completions)\n"
    )
    env = environment(tokenizer, written(tmp_path / "rows.jsonl", ROWS), [f"{tmp_path}/logs.py:logs"])

    async def scene() -> tuple[dict[str, float], dict[str, float]]:
        await env.setup()
        await env.collect_trajectories(0)
        return env.measures.take(), await env.evaluate()

    trained, evaluated = asyncio.run(scene())
    assert trained == {"reward_logs": 1.0, "fine": 7.0}
    assert evaluated["reward"] == 1.0 and evaluated["rows"] == 20 and evaluated["fine"] == 7.0
    assert not evaluated.keys() & {"bad", "reward_logs"} and evaluated["rows_failed"] == 0
    assert caplog.text.count("metric bad") == caplog.text.count("metric rows") == 1


def test_messages_are_prompts_and_completions_are_messages(tmp_path: Path, tokenizer: Qwen2Tokenizer) -> None:
    tokenizer.chat_template = CHAT
    (tmp_path / "roles.py").write_text(
        "def roles(completions, prompts, **kwargs):\n"
        "    assert prompts[0] == [{'role': 'user', 'content': 'hi'}]\n"
        "    return [float(c == [{'role': 'assistant', 'content': '1'}]) for c in completions]\n"
    )
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "an answer that is not a prompt"}]
    data = written(tmp_path / "rows.jsonl", [{"messages": talk}])
    env = environment(tokenizer, data, [f"{tmp_path}/roles.py:roles"])
    assert asyncio.run(first_group(env)).scores == [1.0, 0.0]
    assert asked(env) == [{"role": "user", "content": "hi"}]


def test_measures_leave_out_values_that_are_not_finite() -> None:
    measures = Measures()
    for value in (1.0, float("nan"), 3.0):
        measures.add("x", value)
    assert measures.take() == {"x": 2.0}


def test_messages_need_a_chat_template(tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str) -> None:
    tokenizer.chat_template = None
    data = written(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "hi"}], "answer": "1"}])
    with pytest.raises(ConfigError) as caught:
        asked(environment(tokenizer, data, [f"{rewards}:right"]))
    assert caught.value.field == "--env.tokenizer_name demo"


def test_prompts_that_leave_no_room_are_skipped_and_counted(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        *ROWS,
        {"prompt": "1" * 70, "answer": "1"},
        {"prompt": "1" * 64, "answer": "1"},
        {"prompt": "1" * 63, "answer": "1"},
    ]
    env = environment(tokenizer, written(tmp_path / "rows.jsonl", rows), [f"{rewards}:right"], max_token_length=64)
    asked(env)
    assert sorted(next(env.items) for _ in range(21)) == [*range(20), 22]
    assert "2 prompts" in caplog.text and "70 tokens" in caplog.text


def test_data_without_a_prompt_that_fits_is_refused(tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str) -> None:
    data = written(tmp_path / "rows.jsonl", [{"prompt": "1" * 70, "answer": "1"}])
    with pytest.raises(ConfigError) as caught:
        asked(environment(tokenizer, data, [f"{rewards}:right"], max_token_length=64))
    assert caught.value.field == "--env.max_token_length" and "70 tokens" in caught.value.got


def test_what_functions_log_reaches_metrics_and_messages(tmp_path: Path, tokenizer: Qwen2Tokenizer) -> None:
    (tmp_path / "logs.py").write_text(
        "def logs(completions, log_extra, log_metric, trainer_state, completion_ids, **kwargs):\n"
        "    log_extra('seen', [c.upper() for c in completions])\n"
        "    log_metric('step', trainer_state.global_step / trainer_state.max_steps)\n"
        "    return [len(ids) for ids in completion_ids]\n"
    )
    env = environment(
        tokenizer, written(tmp_path / "rows.jsonl", ROWS), [f"{tmp_path}/logs.py:logs"], ["a" + END, "bc" + END]
    )
    env.curr_step, env.num_steps = 7, 10
    group = asyncio.run(first_group(env))
    assert group.scores == [2.0, 3.0]  # with the end token
    assert group.messages is not None
    assert [talk[-1]["extra"] for talk in group.messages] == [{"seen": "A"}, {"seen": "BC"}]
    assert env.measures.take() == {"reward_logs": 2.5, "step": 0.7}


# ---------------------------------------------------------------- a resumed run


def saved_run(folder: Path) -> Path:
    """A run's folder with a checkpoint; returns its record of the data."""
    (folder / "checkpoints" / "step_5").mkdir(parents=True)
    (folder / "checkpoints" / "step_5" / "state.json").write_text("{}")
    return folder / "data" / "env-dataset.json"


async def begun(env: DatasetEnv) -> dict[str, Any]:
    """Set an environment up as `serve` does, and return its record."""
    await env.setup()
    assert env.config.data_record is not None
    keep(env.config.data_record, env.data_sets())
    return json.loads(env.config.data_record.read_text())


def test_changed_data_end_a_resumed_run_unless_that_is_allowed(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str
) -> None:
    data, record = written(tmp_path / "rows.jsonl", ROWS), saved_run(tmp_path / "run")
    first = asyncio.run(begun(environment(tokenizer, data, [f"{rewards}:right"], data_record=record)))
    digest = hashlib.sha256(hashlib.sha256(data.read_bytes()).digest()).hexdigest()
    assert first == {"data": [{"name": str(data), "rows": 20, "fingerprint": digest}], "earlier": []}
    assert asyncio.run(begun(environment(tokenizer, data, [f"{rewards}:right"], data_record=record))) == first
    written(data, ROWS[:19])
    with pytest.raises(ConfigError) as caught:
        asyncio.run(begun(environment(tokenizer, data, [f"{rewards}:right"], data_record=record)))
    assert caught.value.field == f"--data {data}" and "--allow-changed-data" in caught.value.fix
    assert caught.value.got.startswith("19 rows") and caught.value.wanted.startswith("20 rows")
    allow = {"allow_changed": True}
    allowed = asyncio.run(begun(environment(tokenizer, data, [f"{rewards}:right"], options=allow, data_record=record)))
    assert allowed["data"][0]["rows"] == 19 and allowed["earlier"] == [first["data"]]


def test_a_run_without_a_checkpoint_may_begin_again_with_other_data(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str
) -> None:
    data, record = written(tmp_path / "rows.jsonl", ROWS), tmp_path / "run" / "data" / "env-dataset.json"
    asyncio.run(begun(environment(tokenizer, data, [f"{rewards}:right"], data_record=record)))
    written(data, ROWS[:19])
    again = asyncio.run(begun(environment(tokenizer, data, [f"{rewards}:right"], data_record=record)))
    assert again["data"][0]["rows"] == 19 and again["earlier"] == []


# ---------------------------------------------------------------- rewards that fail


def test_a_reward_that_raises_loses_its_group_and_is_shown_once(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.py").write_text("def broken(completions, prompt):\n    raise KeyError(prompt[0])\n")
    data = written(tmp_path / "rows.jsonl", ROWS)
    out = tmp_path / "groups.jsonl"
    env = environment(tokenizer, data, [f"{tmp_path}/broken.py:broken"], data_path_to_save_groups=out)
    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(process(env, 32))
    assert "KeyError" in caught.value.got
    assert caplog.text.count("broken.py") == caplog.text.count("Traceback") == 1


def test_a_reward_that_returns_something_else_is_shown_without_a_traceback(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "short.py").write_text("def short(completions):\n    return [1.0]\n")
    out = tmp_path / "groups.jsonl"
    env = environment(
        tokenizer, written(tmp_path / "rows.jsonl", ROWS), [f"{tmp_path}/short.py:short"], data_path_to_save_groups=out
    )
    with pytest.raises(EnvironmentFailed):
        asyncio.run(process(env, 32))
    assert caplog.text.count("short.py:short") == 1 and "Traceback" not in caplog.text


def test_a_bad_row_of_larger_data_loses_its_group(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHECKED_WHOLE", 10)
    monkeypatch.setattr(reading, "SAMPLED_ROWS", 2)
    data = written(tmp_path / "rows.jsonl", [*ROWS[:5], {"prompt": 7, "answer": "1"}])
    env = environment(tokenizer, data, [f"{rewards}:right"])

    async def scene() -> None:
        await env.setup()
        assert await env.collect_trajectories(4) is not None
        await env.collect_trajectories(5)

    with pytest.raises(UnusableRow) as caught:
        asyncio.run(scene())
    assert caught.value.field == f"--data {data}, line 6"


def test_a_prompt_of_larger_data_that_is_known_to_be_too_long_is_not_drawn(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHECKED_WHOLE", 10)
    monkeypatch.setattr(reading, "SAMPLED_ROWS", 2)
    data = written(tmp_path / "rows.jsonl", [ROWS[0], {"prompt": "1" * 70, "answer": "1"}, *ROWS[2:5]])
    env = environment(tokenizer, data, [f"{rewards}:right"], max_token_length=64)
    asked(env)
    assert sorted(next(env.items) for _ in range(4)) == [0, 2, 3, 4]


def test_a_trial_says_which_rows_columns_and_rewards_are_used(
    tmp_path: Path, tokenizer: Qwen2Tokenizer, rewards: str
) -> None:
    data = written(tmp_path / "rows.jsonl", ROWS)
    env = environment(tokenizer, data, [f"{rewards}:right=0.5"], options={"held_out": 4})
    steps: list[str] = []

    async def scene() -> str:
        await env.setup()
        return await env.rehearse(0, steps.append)

    found = asyncio.run(scene())
    assert found.startswith(f"16 rows of {data}") and "4 held" in found
    assert all(part in found for part in ("column prompt", "column answer", "--data.chat", "right (weight 0.5)"))
    assert steps == ["prompt()", "sampling()", "score_group()"]
