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
from tests.stand_ins import Scripted

END = "<|endoftext|>"
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]
CODE = """
import asyncio

def right(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer)]

def length(completions):
    return [len(c) for c in completions]

def some(completions):
    return [None if c == '1' else 2.0 for c in completions]

def never(completions):
    return [None] * len(completions)

def logs(completions, log_extra, log_metric, trainer_state, completion_ids, **kwargs):
    log_extra('seen', [c.upper() for c in completions])
    log_metric('step', trainer_state.global_step / max(1, trainer_state.max_steps))
    for name in ('reward_logs', 'rows'):
        log_metric(name, 7)
    log_metric('bad', float('inf'))
    return [len(ids) for ids in completion_ids]

def roles(completions, prompts, **kwargs):
    assert prompts[0] == [{'role': 'user', 'content': 'hi'}]
    return [float(c == [{'role': 'assistant', 'content': '1'}]) for c in completions]

async def judged(completions, prompt, **kwargs):
    if prompt[0] == "3+1=":
        await asyncio.Event().wait()
    if prompt[0] == "5+1=":
        raise KeyError("no judge")
    return [1.0] * len(completions)

def broken(completions, prompt):
    raise KeyError(prompt[0])

def short(completions):
    return [1.0]
"""
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<>{% endif %}"


@pytest.fixture
def tokenizer() -> Qwen2Tokenizer:
    return build_tokenizer()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my.py").write_text(CODE)
    return tmp_path


def written(path: Path, rows: Sequence[Any] = ROWS) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def environment(
    tokenizer: Qwen2Tokenizer,
    data: Path,
    *rewards: str,
    answers: Sequence[str] = ("1" + END, "2" + END),
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> DatasetEnv:
    """An environment whose rewards are functions of `CODE`: `right` if none is named."""
    config = DatasetConfig(**({"tokenizer_name": "demo", "group_size": len(answers)} | changes))
    env = DatasetEnv(config, Scripted(tokenizer, lambda _: answers), tokenizer)
    env.data = DataConfig(path=str(data), **(options or {}))
    env.rewards = tuple(RewardConfig.model_validate(f"{data.parent}/my.py:{each}") for each in rewards or ("right",))
    return env


def group_of(env: DatasetEnv, item: int = 0) -> wire.ScoredData:
    async def scene() -> wire.ScoredData | None:
        await env.setup()
        return await env.collect_trajectories(item)

    group = asyncio.run(scene())
    assert group is not None
    return group


def asked(env: DatasetEnv, item: int = 0) -> Any:
    asyncio.run(env.setup())
    return env.prompt(item)


def evaluated(env: DatasetEnv) -> dict[str, float]:
    async def scene() -> dict[str, float]:
        await env.setup()
        return await env.evaluate()

    return asyncio.run(asyncio.wait_for(scene(), 60))


# ---------------------------------------------------------------- groups


def test_dataset_rows_become_groups_with_weighted_rewards_and_their_metrics(
    folder: Path, tokenizer: Qwen2Tokenizer
) -> None:
    data = written(folder / "rows.jsonl")  # the first row: 0+1=, 1
    env = environment(tokenizer, data, "right", "length=0.1", answers=["1" + END, "22" + END])
    group = group_of(env)
    assert group.scores == pytest.approx([1.1, 0.2])
    assert group.messages is not None
    assert group.messages[0] == [{"role": "user", "content": "0+1="}, {"role": "assistant", "content": "1"}]
    assert env.measures.take() == {"reward_right": 0.5, "reward_length": 1.5}


def test_dataset_a_sample_to_which_no_reward_applies_is_not_trained_on(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    data = written(folder / "rows.jsonl")
    group = group_of(environment(tokenizer, data, "some"))
    assert group.overrides == [{"unscored": True}, {}] and wire.counted_scores(group) == [2.0]
    assert set(group.masks[0]) == {wire.IGNORED} and set(group.masks[1]) != {wire.IGNORED}
    env = environment(tokenizer, data, "never=5", "right")
    assert group_of(env).scores == [1.0, 0.0] and env.measures.take() == {"reward_right": 0.5}
    env = environment(tokenizer, data, "never")
    assert unfit(group_of(env), env.config, max_token_len=-1) == ALL_UNSCORED


def test_dataset_what_functions_log_reaches_metrics_and_messages(
    folder: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics that are not finite, or have names of the environment's own, are left out, and the log says so once."""
    env = environment(tokenizer, written(folder / "rows.jsonl"), "logs", answers=["a" + END, "bc" + END])
    env.curr_step, env.num_steps = 7, 10
    group = group_of(env)
    assert group.scores == [2.0, 3.0]  # with the end token
    assert group.messages is not None
    assert [talk[-1]["extra"] for talk in group.messages] == [{"seen": "A"}, {"seen": "BC"}]
    assert env.measures.take() == {"reward_logs": 2.5, "step": 0.7}
    env.curr_step = 0
    metrics = asyncio.run(env.evaluate())
    assert metrics["reward"] == 2.0 and metrics["rows"] == 20 and not metrics.keys() & {"bad", "reward_logs"}
    assert caplog.text.count("metric bad") == caplog.text.count("metric rows") == 1


@pytest.mark.parametrize(("reward", "text", "traces"), [("broken", "KeyError", 1), ("short", "short", 0)])
def test_dataset_a_reward_that_fails_loses_its_group_and_is_shown_once(
    folder: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture, reward: str, text: str, traces: int
) -> None:
    out = folder / "groups.jsonl"
    env = environment(tokenizer, written(folder / "rows.jsonl"), reward, data_path_to_save_groups=out)
    with pytest.raises(EnvironmentFailed) as caught:
        asyncio.run(process(env, 32))
    assert text in caught.value.got and caplog.text.count("Traceback") == traces
    assert sum("my.py" in record.getMessage() for record in caplog.records) <= 1


def test_dataset_messages_are_prompts_and_completions_are_messages(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "an answer that is not a prompt"}]
    data = written(folder / "rows.jsonl", [{"messages": talk, "answer": "1"}])
    tokenizer.chat_template = CHAT
    env = environment(tokenizer, data, "roles")
    assert group_of(env).scores == [1.0, 0.0] and env.prompt(0) == talk[:1]
    tokenizer.chat_template = None
    with pytest.raises(ConfigError) as caught:
        asked(environment(tokenizer, data))
    assert caught.value.field == "--env.tokenizer_name demo"


# ---------------------------------------------------------------- prompts

USER = [{"role": "user", "content": "0+1="}]


@pytest.mark.parametrize(
    ("chat", "template", "row", "prompt"),
    [
        *(("auto", CHAT, "0+1=", USER), ("on", CHAT, "0+1=", USER), ("off", CHAT, "0+1=", "0+1=")),
        ("auto", None, "0+1=", "0+1="),
        ("auto", CHAT, f"{END}1+1=", f"{END}1+1="),  # rendered already
    ],
)
def test_dataset_text_becomes_a_user_message_where_the_model_has_a_chat_template(
    folder: Path, tokenizer: Qwen2Tokenizer, chat: str, template: str | None, row: str, prompt: Any
) -> None:
    tokenizer.chat_template = template
    data = written(folder / "rows.jsonl", [{"prompt": row, "answer": "1"}])
    assert asked(environment(tokenizer, data, options={"chat": chat})) == prompt
    if template and prompt != USER:
        with pytest.raises(ConfigError) as caught:
            asked(environment(tokenizer, data, options={"chat": chat}, system_prompt="Be brief."))
        assert caught.value.field == "--env.system_prompt"


def test_dataset_one_prompt_with_a_special_token_does_not_send_the_others_as_plain_text(
    folder: Path, tokenizer: Qwen2Tokenizer
) -> None:
    tokenizer.chat_template = CHAT
    data = written(folder / "rows.jsonl", [*ROWS[:3], {"prompt": f"What is {END}?", "answer": "2"}])
    assert asked(environment(tokenizer, data)) == USER


def test_dataset_prompts_that_leave_no_room_are_skipped_and_counted(
    folder: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [{"prompt": "1" * length, "answer": "1"} for length in (70, 64, 63)]
    env = environment(tokenizer, written(folder / "rows.jsonl", [*ROWS, *long]), max_token_length=64)
    asked(env)
    assert sorted(next(env.items) for _ in range(21)) == [*range(20), 22]
    assert "2 prompts" in caplog.text and "70 tokens" in caplog.text
    with pytest.raises(ConfigError) as caught:
        asked(environment(tokenizer, written(folder / "none.jsonl", long[:1]), max_token_length=64))
    assert caught.value.field == "--env.max_token_length" and "70 tokens" in caught.value.got
    monkeypatch.setattr(reading, "CHECKED_WHOLE", 10)  # of larger data only the first rows are checked
    monkeypatch.setattr(reading, "SAMPLED_ROWS", 2)
    data = written(folder / "large.jsonl", [ROWS[0], long[0], ROWS[2], {"prompt": 7, "answer": "1"}])
    env = environment(tokenizer, data, max_token_length=64)
    asked(env)
    assert sorted(next(env.items) for _ in range(3)) == [0, 2, 3]
    with pytest.raises(UnusableRow) as bad:
        asyncio.run(env.collect_trajectories(3))
    assert bad.value.field == f"--data {data}, line 4, column prompt"


# ---------------------------------------------------------------- held-out rows


def test_dataset_held_out_rows_are_the_same_for_every_seed_and_never_trained_on(
    folder: Path, tokenizer: Qwen2Tokenizer
) -> None:
    data = written(folder / "rows.jsonl")
    held_out, orders = [], []
    for seed in (0, 1):
        env = environment(tokenizer, data, options={"held_out": 5}, seed=seed)
        asyncio.run(env.setup())
        held_out.append(set(env._held_out))
        orders.append([next(env.items) for _ in range(30)])
    assert held_out[0] == held_out[1] and len(held_out[0]) == 5 and orders[0] != orders[1]
    for order in orders:  # each row once before any comes again
        assert sorted(order[:15]) == sorted(order[15:]) == sorted(set(range(20)) - held_out[0])


def test_dataset_held_out_rows_do_not_depend_on_which_prompts_fit(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    data = written(folder / "rows.jsonl", [{"prompt": "1" * (10 + 3 * n), "answer": "1"} for n in range(20)])
    found = []
    for longest in (50, 80):
        env = environment(tokenizer, data, options={"held_out": 10}, max_token_length=longest)
        asyncio.run(env.setup())
        found.append(set(env._held_out))
    assert 0 < len(found[0]) < len(found[1]) == 10 and found[0] < found[1]


@pytest.mark.parametrize("count", [20, 25])
def test_dataset_not_all_rows_can_be_held_out(folder: Path, tokenizer: Qwen2Tokenizer, count: int) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(environment(tokenizer, written(folder / "rows.jsonl"), options={"held_out": count}))
    assert caught.value.field == "--data.held_out"


def test_dataset_prompts_that_are_both_trained_on_and_held_out_are_counted(
    folder: Path, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    new = [{"prompt": "5+5=", "answer": "10"}]
    data, other = written(folder / "rows.jsonl"), written(folder / "test.jsonl", [*ROWS[:3], *new])
    asked(environment(tokenizer, data, options={"held_out": 4}))
    assert not [record for record in caplog.records if "held-out" in record.getMessage()]
    asked(environment(tokenizer, data, options={"held_out_split": str(other)}))
    (warning,) = [record.getMessage() for record in caplog.records if "held-out" in record.getMessage()]
    assert re.findall(r"\d+", warning)[:2] == ["3", "4"]


def test_dataset_evaluation_scores_held_out_rows_with_intervals(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    train, held_out = written(folder / "rows.jsonl"), written(folder / "test.jsonl", ROWS[:4])
    options = {"held_out_split": str(held_out)}
    env = environment(tokenizer, train, "right", "length=0.5", answers=["1" + END], options=options)
    metrics = evaluated(env)
    # The answer 1 is right for 0+1= alone: rewards 1.5, 0.5, 0.5, 0.5, of mean 0.75 and standard deviation 0.5.
    assert metrics["reward"] == 0.75 and metrics["reward_right"] == 0.25 and metrics["reward_length"] == 1.0
    assert metrics["reward_high"] - metrics["reward"] == pytest.approx(1.96 * 0.5 / 2, abs=1e-3)
    assert metrics["rows"] == 4 and env.measures.take() == {}


def test_dataset_evaluation_without_held_out_rows_scores_all_but_none_in_a_run(
    folder: Path, tokenizer: Qwen2Tokenizer
) -> None:
    env = environment(tokenizer, written(folder / "rows.jsonl"))
    alone = evaluated(env)
    assert alone["rows"] == 20 and alone["reward"] == 0.05  # 1 is the answer to 0+1= alone
    env.curr_step = 3
    assert asyncio.run(env.evaluate()) == {}


def test_dataset_evaluation_counts_rows_that_hang_raise_or_are_too_long(
    folder: Path, tokenizer: Qwen2Tokenizer
) -> None:
    held_out = written(folder / "test.jsonl", [*ROWS[:10], {"prompt": "1" * 70, "answer": "1"}])
    env = environment(
        tokenizer, written(folder / "rows.jsonl"), "judged", answers=["1" + END],
        options={"held_out_split": str(held_out)}, score_timeout=0.2, max_token_length=64,
    )  # fmt: skip

    async def scene() -> dict[str, float]:
        await env.setup()
        env._held_out = range(11)  # large data is not checked before the start
        return await env.evaluate()

    metrics = asyncio.run(asyncio.wait_for(scene(), 60))
    assert metrics["reward"] == 1.0 and metrics["rows"] == 8 and metrics["rows_failed"] == 3
    with pytest.raises(EnvironmentFailed, match="0\\+1="):
        evaluated(environment(tokenizer, written(folder / "one.jsonl", ROWS[:1]), "broken"))


def test_dataset_evaluation_ends_with_the_server_and_has_few_rows_in_flight(
    folder: Path, tokenizer: Qwen2Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "AT_ONCE", 3)
    env = environment(tokenizer, written(folder / "rows.jsonl"))
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
    with pytest.raises(PeerGone):
        evaluated(env)
    assert len(asked) == 3


def test_intervals_of_shares_are_wilsons_and_of_other_values_normal() -> None:
    assert mean_with_interval("x", [1.0, 1.0])["x_high"] == 1.0
    assert mean_with_interval("x", [1.0, 1.0])["x_low"] == pytest.approx(0.342, abs=1e-3)  # 2 / (2 + 1.96²)
    found = mean_with_interval("x", [0.0, 2.0])  # standard deviation √2: half = 1.96 · √2 / √2
    assert [found["x"], found["x_low"], found["x_high"]] == pytest.approx([1.0, -0.96, 2.96], abs=1e-3)


def test_measures_leave_out_values_that_are_not_finite() -> None:
    measures = Measures()
    for value in (1.0, float("nan"), 3.0):
        measures.add("x", value)
    assert measures.take() == {"x": 2.0}


# ---------------------------------------------------------------- a resumed run, and a trial


def test_dataset_changed_data_end_a_resumed_run_unless_that_is_allowed(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    data, record = written(folder / "rows.jsonl"), folder / "run" / "data" / "env-dataset.json"

    def begun(**options: Any) -> dict[str, Any]:
        """Set an environment up as `serve` does, and return its record."""
        env = environment(tokenizer, data, options=options, data_record=record)
        asyncio.run(env.setup())
        keep(record, env.data_sets())
        return json.loads(record.read_text())

    digest = hashlib.sha256(hashlib.sha256(data.read_bytes()).digest()).hexdigest()
    first = {"data": [{"name": str(data), "rows": 20, "fingerprint": digest}], "earlier": []}
    assert begun() == first
    written(data, ROWS[:18])  # without a checkpoint a run begins again, with any data
    assert begun()["data"][0]["rows"] == 18 and begun()["earlier"] == []
    (folder / "run" / "checkpoints" / "step_5").mkdir(parents=True)
    (folder / "run" / "checkpoints" / "step_5" / "state.json").write_text("{}")
    written(data)
    with pytest.raises(ConfigError) as caught:
        begun()
    assert caught.value.field == f"--data {data}" and "--allow-changed-data" in caught.value.fix
    assert caught.value.got.startswith("20 rows") and caught.value.wanted.startswith("18 rows")
    allowed = begun(allow_changed=True)
    assert allowed["data"] == first["data"] and allowed["earlier"][0][0]["rows"] == 18


def test_dataset_a_trial_says_which_rows_columns_and_rewards_are_used(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    data = written(folder / "rows.jsonl")
    env = environment(tokenizer, data, "right=0.5", options={"held_out": 4})
    steps: list[str] = []
    asyncio.run(env.setup())
    found = asyncio.run(env.rehearse(0, steps.append))
    assert found.startswith(f"16 rows of {data}") and "4 held" in found
    assert all(part in found for part in ("column prompt", "column answer", "--data.chat", "right (weight 0.5)"))
    assert steps == ["prompt()", "sampling()", "score_group()"]
