"""Groups from the rollout API: decoded, and left out if they can't be trained on or are too old."""

from __future__ import annotations

import itertools
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from transformers import LlamaConfig

from environments.api import wire
from environments.api.overview import Explainer
from environments.api.queue import RolloutQueue
from environments.config import BaseEnvConfig
from environments.running.groups import EQUAL_IN_A_ROW, GroupMaker
from grpo_trainer import feed as feed_module
from grpo_trainer import signals
from grpo_trainer.batch.batching import ready
from grpo_trainer.config.train import RolloutConfig, TrainConfig
from grpo_trainer.errors import TrainingError
from grpo_trainer.feed import UNFIT_IN_A_ROW, BatchFeed
from grpo_trainer.metrics.types import reduce
from grpo_trainer.rollouts import client as client_module
from grpo_trainer.rollouts.client import RolloutClient
from grpo_trainer.rollouts.filter import GroupFilter, judge, misfit
from grpo_trainer.rollouts.groups import Group, RolloutBatch, to_group
from grpo_trainer.saving.manifest import Progress
from grpo_trainer.trainer import Trainer
from tests.stand_ins import registration
from tests.unit.factories import VOCAB, TinyModel, refusing, sample
from vllm_server.protocol import PROOF_VERSION

CONFIG = TrainConfig(model_name="m", seq_len=10, batch_size=2)

# ---------------------------------------------------------------- decoding

ROWS: dict[str, Any] = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0]}


def decoded(**fields: Any) -> Group:
    return to_group(wire.pack(wire.ScoredData(**{**ROWS, **fields})))


def test_decoding_keeps_what_belongs_to_trained_tokens() -> None:
    """A tool's answer between two turns is not trained, nor is a first token, which nothing predicts."""
    rows = {"tokens": [[1, 2, 3, 4], [5, 6]], "masks": [[-100, 2, -100, 4], [5, 6]]}
    values = [[1.0, -0.5, 1.0, -0.25], [-1.0, -2.0]]
    tool, bare = decoded(**rows, inference_logprobs=values, advantages=values, policy_versions=[7, 8]).samples
    assert [one.tokens_T.tolist() for one in (tool, bare)] == rows["tokens"]
    assert [one.positions.tolist() for one in (tool, bare)] == [[1, 3], [1]]
    for one, wanted in ((tool, [-0.5, -0.25]), (bare, [-2.0])):
        assert one.rollout_logprobs is not None and one.rollout_logprobs.tolist() == wanted
        assert one.advantages is not None and one.advantages.tolist() == wanted
    assert [(one.version, one.start) for one in (tool, bare)] == [(7, 1), (8, 0)]
    assert decoded(inference_logprobs=[[1.0, 1.0], [1.0, 1.0]]).samples[0].rollout_logprobs is None, "placeholders"
    masked = decoded(masks=[[-100, -100], [-100, 3]], inference_logprobs=[[1.0, -0.5], [1.0, -0.5]]).samples[0]
    assert not len(masked.positions) and masked.start == 1, "an answer that is left out of the loss begins there"


def test_decoding_a_sequences_overrides_stand_over_the_groups() -> None:
    assert [s.supervised for s in decoded(overrides=[{"sft": True}, {}]).samples] == [True, False]
    mixed = decoded(group_overrides={"sft": True, "temperature": 0.5}, overrides=[{}, {"sft": False}]).samples
    assert [(s.supervised, s.temperature) for s in mixed] == [(True, 0.5), (False, 0.5)]
    sampled = decoded(generation_params={"temperature": 0.7}, overrides=[{"temperature": 0.5}, {}]).samples
    assert [one.temperature for one in (*sampled, *decoded().samples)] == [0.5, 0.7, 1.0, 1.0]
    marked, other = decoded(overrides=[{"unscored": True}, {"truncated": True}]).samples
    assert (marked.unscored, marked.truncated, len(marked.positions)) == (True, False, 0)
    assert (other.unscored, other.truncated, len(other.positions)) == (False, True, 1)
    assert Group((marked, other)).rewards == [1.0]
    first, second = decoded(overrides=[{"set_advantage_to_zero": True}, {}]).samples
    assert first.advantages is not None and first.advantages.tolist() == [0.0]
    assert second.advantages is None  # the group's own
    given = decoded(overrides=[{}, {"set_advantage_to_zero": True}], advantages=[[2.0, 3.0], [4.0, 5.0]]).samples
    assert [s.advantages.tolist() for s in given if s.advantages is not None] == [[3.0], [0.0]]


def test_a_teachers_tokens_come_padded_to_the_most_that_it_gave() -> None:
    lists: dict[str, Any] = {"distill_token_ids": [[[], [7, 8]], [[], [-1]]]}
    taught, untaught = decoded(**lists, distill_logprobs=[[[], [-0.25, -1.5]], [[], [0.0]]]).samples
    assert taught.teacher is not None and taught.teacher.ids_NK.tolist() == [[7, 8]]
    assert taught.teacher.logprobs_NK.tolist() == [[-0.25, -1.5]] and taught.teacher.given_N.tolist() == [True]
    assert untaught.teacher is None  # an id below 0 is filling


# ---------------------------------------------------------------- what can't be trained on

GOOD = Group((sample([1], [2], 0.0), sample([1], [3], 1.0)), environment=0)


def bad(**changes: Any) -> Group:
    return replace(GOOD, samples=(GOOD.samples[0], replace(GOOD.samples[1], **changes)))


def stored(**unknown: Any) -> Group:
    """A group of version 0.1.0, from a queue: its masks of samples are an unknown field."""
    data = wire.ScoredData(**ROWS, generation_params={"top_p": 0.9})
    packed = msgspec.to_builtins(wire.pack(data), builtin_types=[bytes])
    return to_group(wire.decode(msgspec.msgpack.encode(packed | unknown), wire.PackedGroup, wire.MSGPACK))


UNFIT = [
    (bad(tokens_T=np.array([1, 2_000_000_000])), "1: tokens", "2000000000"),
    (bad(tokens_T=np.array([1, VOCAB])), "1: tokens", str(VOCAB)),
    (bad(tokens_T=np.array([-1, 3])), "1: tokens", "-1"),
    (bad(teacher=sample([1], [2], 0.0, teacher=[{VOCAB: -0.5}]).teacher), "1: distill_token_ids", str(VOCAB)),
    (bad(temperature=-1.0), "1: temperature", "-1"),
    (bad(temperature=float("inf")), "1: temperature", "inf"),
    (decoded(generation_params={"temperature": {}}, overrides=[{"temperature": 1.0}, {}]), "1: temperature", "nan"),
    (decoded(overrides=[{}, {"temperature": "hot"}]), "1: temperature", "nan"),
    (bad(reward=1e300), "1: scores", "1e+300"),
    (bad(advantages=np.array([np.inf], np.float32)), "1: advantages", "inf"),
    (bad(rollout_logprobs=np.array([-np.inf], np.float32)), "1: inference_logprobs", "-inf"),
    # sampled so that the trainer can't compute the probabilities
    (decoded(generation_params={"top_p": 0.9}), "0: top_p", "0.9"),
    (decoded(generation_params={"repetition_penalty": 1.1}), "0: repetition_penalty", "1.1"),
    (decoded(overrides=[{}, {"top_k": 2}]), "1: top_k", "2"),
    (decoded(group_overrides={"min_p": 0.1}), "0: min_p", "0.1"),
    (stored(sampling_masks=[bytes([1, 1, 1, 2])] * 2), "0: top_p", "0.9"),
]


@pytest.mark.parametrize(("group", "field", "got"), UNFIT)
def test_a_group_that_would_end_the_run_is_told_apart_by_field_and_value(group: Group, field: str, got: str) -> None:
    problem = misfit(group, VOCAB)
    assert problem is not None and (problem.field, problem.got) == (f"sequence {field}", got)
    assert problem.wanted and (problem.fix or not field.endswith(("_p", "_k", "_penalty")))


@pytest.mark.parametrize(
    "group",
    [
        GOOD,
        decoded(group_overrides={"min_p": 0.1, "sft": True}),  # imitated: it may have been sampled in any way
        decoded(generation_params={"top_p": 1.0, "top_k": -1, "min_p": 0.0, "temperature": 0.7}),
        # what is not trained does not matter
        decoded(inference_logprobs=[[float("nan"), -0.5]] * 2, advantages=[[float("inf"), 1.0]] * 2),
    ],
)
def test_misfit_takes_what_can_be_trained_on(group: Group) -> None:
    assert misfit(group, VOCAB) is None


def test_a_group_without_a_trained_token_is_left_out_wherever_the_others_are() -> None:
    empty = Group((sample([1, 2], [], 0.0), sample([1, 2], [], 1.0)), environment=0)
    half = Group((empty.samples[0], sample([1, 2], [3], 1.0)), environment=0)
    beyond = Group((sample([1] * 12, [3], 0.0),), environment=0)
    for unfit, longest in ((empty, None), (beyond, 10)):
        problem = misfit(unfit, VOCAB, longest)
        assert problem is not None and problem.field == "masks" and str(longest or 2) in problem.got
    assert misfit(half, VOCAB) is None and misfit(beyond, VOCAB) is None
    cut_off = replace(empty, samples=tuple(replace(each, truncated=True) for each in empty.samples))
    assert misfit(cut_off, VOCAB) is None, "left out of the loss on purpose"


# ---------------------------------------------------------------- what the feed does with them


class Api:
    """A rollout API with these batches."""

    def __init__(self, batches: Iterator[tuple[Group, ...]]) -> None:
        self.batches = batches
        self.dropped: list[str] = []

    def lease(self, check_stop: Any) -> RolloutBatch:
        return RolloutBatch("b", next(self.batches))

    def drop(self, leased: RolloutBatch, why: str) -> None:
        self.dropped.append(why)

    def environment_name(self, env_id: int | None) -> str:
        return f"environment sums_{env_id}"


def feed(api: Any, config: RolloutConfig | None = None, **others: Any) -> Any:
    config = config or RolloutConfig(prefetch=False)
    groups = GroupFilter(VOCAB, api.environment_name, CONFIG.seq_len)
    return BatchFeed(api, config, groups, lambda one: ready(one, CONFIG), lambda: None, **others)


def warned(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record.args for record in caplog.records if record.name == "grpo_trainer.rollouts.filter"]


def test_feed_trains_the_rest_and_names_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    poison = UNFIT[0][0]
    api = Api(iter([(poison, GOOD), (poison, poison), (GOOD, GOOD)]))
    with caplog.at_level(logging.WARNING), feed(api) as batches:
        first, second = batches.next(0), batches.next(1)
    assert first.rollouts.groups == (GOOD,)  # the log of samples sees no other either
    assert [reduce(each.metrics)["rollout/refused_groups"] for each in (first, second)] == [1, 2]
    assert reduce(second.metrics)["rollout/dropped_stale_groups"] == 0
    (why,) = api.dropped
    assert "environment sums_0: sequence 1: tokens: " in why
    ((problem,),) = warned(caplog)
    assert (problem.field, problem.got) == ("environment sums_0: sequence 1: tokens", "2000000000")
    assert Trainer(TinyModel(), CONFIG).step(first, 0).updated


def test_a_wait_that_is_interrupted_goes_on_with_the_same_lease_and_counts() -> None:
    poison, arrives = UNFIT[0][0], threading.Event()

    class Slow(Api):
        def lease(self, check_stop: Any) -> RolloutBatch:
            leased = super().lease(check_stop)
            assert leased.groups != (poison, GOOD) or arrives.wait(60)
            return leased

    api: Any = Slow(iter([(poison, poison), (poison, GOOD)]))
    with feed(api, is_needed=lambda: True) as batches:
        while not api.dropped:
            assert batches.next(0) is None
        assert batches.next(0) is None
        arrives.set()
        while (found := batches.next(0)) is None:
            pass
    assert found.rollouts.groups == (GOOD,) and len(api.dropped) == 1
    assert reduce(found.metrics)["rollout/refused_groups"] == 3


def test_each_environment_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of sequences that are cut, and of logprobs without a word on how they were sampled."""
    long = Group((sample([1], [2] * 100_000, 0.0), sample([1], [3], 1.0)), environment=0)
    silent = replace(GOOD, samples=(sample([1], [2], 0.0, logprobs=[-1.0]), GOOD.samples[1]), says_sampling=False)
    told = replace(silent, says_sampling=True)
    quiet = replace(GOOD, says_sampling=False)
    rows = [(long, told, quiet), (long, silent), (silent, replace(silent, environment=7))]
    with caplog.at_level(logging.WARNING), feed(Api(iter(rows))) as batches:
        found = [batches.next(version) for version in range(3)]
    assert [reduce(each.metrics)["batch/truncated"] for each in found] == [1, 1, 0]
    names = ("environment sums_0", "environment sums_7")
    assert warned(caplog) == [(names[0], 100_001, 10), (names[0],), (names[1],)]


def test_feed_ends_the_run_for_an_environment_of_another_vocabulary() -> None:
    api = Api(itertools.repeat((UNFIT[1][0],)))
    with pytest.raises(TrainingError) as ended:
        feed(api).next(0)
    assert ended.value.field.startswith("environment sums_0: ") and str(UNFIT_IN_A_ROW) in ended.value.summary
    assert len(api.dropped) == UNFIT_IN_A_ROW  # none of them comes again after a restart
    assert Trainer(TinyModel(), CONFIG).vocabulary is None  # neither a head nor a configuration: its logits will tell
    configured: Any = TinyModel()
    configured.config = LlamaConfig(vocab_size=7)
    assert Trainer(configured, CONFIG).vocabulary == 7


def test_feed_ends_the_run_for_an_environment_whose_groups_are_all_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0.0, 25.0)
    monkeypatch.setattr(feed_module, "running_time", lambda: next(seconds))
    api = Api(iter([(group(1, 1),)] * 200))
    with refusing(TrainingError, "--rollout-timeout") as ended:
        feed(api, RolloutConfig(prefetch=False, max_staleness=2, rollout_timeout=1000.0)).next(9)
    assert ended.value.got == api.dropped[-1]


# ---------------------------------------------------------------- no batch can ever come


@pytest.mark.parametrize(
    ("sizes", "registered", "limit", "warns"),
    [
        ((6, 6), [6], 0.0, True),  # 12 sequences wait, and 8 is no sum of 6s; an environment with groups of 2 may come
        ((6, 6), [6, 6], 0.0, True),  # also where as many environments are there as the run has started
        ((6, 6), [6], 1e-9, True),
        ((6, 2), [6, 2], 0.0, False),
    ],
)
def test_client_warns_once_that_no_sum_of_the_groups_is_a_batch_and_ends_with_the_time_limit_only(
    sizes: tuple[int, ...],
    registered: list[int],
    limit: float,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = RolloutQueue()
    queue.register(registration(8))
    queue.next_batch(0.0, 60.0)
    for size in registered:
        queue.register_environment(environment(size), 0.0)
    for size in sizes:
        queue.offer(None, size, 100, 0.5, now=0.0)
    status = msgspec.json.encode(Explainer(queue).status(0.0))
    monkeypatch.setattr(client_module, "report_at", lambda said: said)  # at each attempt

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/status":
            return httpx.Response(200, content=status)
        return httpx.Response(200, content=NO_BATCH, headers={"content-type": wire.MSGPACK})

    client, asked = client_of(answer, rollout_timeout=limit), iter(range(4))
    with caplog.at_level(logging.WARNING), pytest.raises(TrainingError if limit else StopIteration) as ended:
        client.lease(lambda: print(next(asked)))
    (*said,) = (record.getMessage() for record in caplog.records if record.name == client_module.__name__)
    assert len(said) == warns
    shown = [*said, *([ended.value.got] if isinstance(ended.value, TrainingError) else [])]
    assert all({"6", "8"} <= {*re.findall(r"\d+", each)} for each in shown)
    assert not limit or getattr(ended.value, "field", "") == "--rollout-timeout"


async def test_environment_warns_once_that_it_sends_nothing_since_all_scores_are_equal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = BaseEnvConfig(tokenizer_name="t", group_size=2, ensure_scores_are_not_same=True)

    async def scored(item: int) -> wire.ScoredData:
        return wire.ScoredData(tokens=ROWS["tokens"], masks=ROWS["masks"], scores=[1.0, 1.0])

    env: Any = SimpleNamespace(config=config, name="sums", scored=scored)
    maker = GroupMaker(env, Counter())
    with caplog.at_level(logging.WARNING):
        for item in range(3 * EQUAL_IN_A_ROW):
            assert await maker.make(item) is None
    (record,) = caplog.records
    assert record.args == ("sums", EQUAL_IN_A_ROW, 1.0)


# ---------------------------------------------------------------- old groups


def group(*versions: int | None) -> Group:
    return Group(tuple(sample([1], [2 + i], float(i), version=version) for i, version in enumerate(versions)))


GROUPS = [group(5, 5), group(3, 4), group(None, None), group(1, 5)]


def test_a_group_is_as_old_as_its_oldest_sample_and_of_unknown_age_never_too_old() -> None:
    judged = judge(GROUPS, 5, limit=2)
    assert judged.groups == (GROUPS[0], GROUPS[1], GROUPS[2]) and judged.shares == (1.0, 1.0, 1.0, 0.0)
    numbers = reduce(judged.metrics)
    assert numbers["rollout/dropped_stale_groups"] == 1
    assert numbers["rollout/staleness_max"] == 2  # 5 - 3
    assert numbers["rollout/staleness_mean"] == pytest.approx(0.75)  # (0 + 0 + 2 + 1) / 4
    assert judge(GROUPS, 50, limit=None).groups == tuple(GROUPS)


@pytest.mark.parametrize("limit", [None, 9])
def test_what_a_proofs_weights_have_sampled_is_not_trained_on(limit: int | None) -> None:
    judged = judge([GROUPS[0], group(PROOF_VERSION, 5)], 5, limit, on_stale="downweight")
    assert judged.groups == (GROUPS[0],)
    assert reduce(judged.metrics)["rollout/dropped_stale_groups"] == 1


def test_downweighted_groups_count_one_over_one_plus_excess() -> None:
    judged = judge(GROUPS, 6, limit=2, on_stale="downweight")
    shares = [{one.share for one in each.samples} for each in judged.groups]
    assert shares == [{1.0}, {0.5}, {1.0}, {0.25}]  # 6 - 3 is 1 above 2: 1 / 2; 6 - 1 is 3 above: 1 / 4
    assert judged.shares == (1.0, 0.5, 1.0, 0.25)
    numbers = reduce(judged.metrics)
    assert numbers["rollout/downweighted_groups"] == 2 and numbers["rollout/dropped_stale_groups"] == 0


def test_a_batch_that_was_fetched_ahead_weighs_by_the_version_that_trains_on_it() -> None:
    api: Any = Api(iter([(group(3, 3),), (group(2, 2),)]))
    config = RolloutConfig(prefetch=True, max_staleness=1, on_stale="downweight")
    with feed(api, config) as batches:
        batches.next(3)  # fetches the next batch for version 4, at which it is 2 versions old: 1 / 2
        again = batches.next(3, last=True)  # the step was skipped, so it is 1 version old
    assert [one.share for one in again.sequences] == [1.0, 1.0]


def test_batches_that_come_again_are_as_old_as_they_would_have_been() -> None:
    """Saved as version 90, the server saw 100: resumed as 101. Batches of the steps 91 to 100 come again, each with
    samples of the version before it, or of four versions before."""
    resumed = Progress(90, 90).going_on_as(101)
    for step in range(10):
        batch = [group(90 + step), group(86 + step)]
        undisturbed = judge(batch, 90 + step, limit=4)
        again = judge(batch, 101 + step, 4, numbering=resumed.numbering)
        assert again.groups == undisturbed.groups == tuple(batch)
        assert reduce(again.metrics) == reduce(undisturbed.metrics)
    # what is sampled from then on: of version 102 at 107 it is 5 updates old; of version 89 at 105, 94 - 89 = 5
    assert not judge([group(102), group(89)], 107, 4, numbering=resumed.numbering).groups
    assert not judge([group(89)], 105, 4, numbering=resumed.numbering).groups
    # a former process has published 100; the resumed one has not come to it again
    assert reduce(judge([group(100)], 101, 4, numbering=resumed.numbering).metrics)["rollout/staleness_max"] == 0


def test_jumps_add_up_and_a_new_run_has_none() -> None:
    # 90 as 101 (11 skipped), trained to 110 (99 updates), gone on with as 120 (21 skipped)
    numbering = Progress(99, 110, (), Progress(90, 90).going_on_as(101).numbering).going_on_as(120).numbering
    assert [numbering.updates(version) for version in (90, 100, 101, 110, 119, 120, 125)] == [
        *(90, 100, 90, 99, 108, 99, 104),
    ]
    # samples of version 49 in the queue are another run's: 51 - 49 = 2 versions old, as ever
    assert Progress().going_on_as(51) == Progress(0, 51)
    assert Progress(7, 7).going_on_as(7) == Progress(7, 7)


# ---------------------------------------------------------------- leases


NO_BATCH = msgspec.msgpack.encode(wire.PackedBatch(batch=None))


def environment(size: int) -> wire.RegisterEnv:
    return wire.RegisterEnv(max_token_length=9, desired_name="sums", weight=1.0, group_size=size)


def client_of(answer: Callable[[httpx.Request], httpx.Response], **options: float) -> RolloutClient:
    config = RolloutConfig.model_validate({"lease_seconds": 8.0, **options})
    client = RolloutClient(config, registration(4, max_token_len=9, num_steps=9), lambda: None)
    client._http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://api")
    return client


def test_leases_are_extended_once_less_than_half_of_their_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of 8 seconds, checked every second. An API that is away is asked once a round: each request may hang."""
    now, extended = 0, []

    def answer(request: httpx.Request) -> httpx.Response:
        extended.append((now, request.url.path.removeprefix("/batch/")))
        if now == 5:
            raise httpx.ConnectError("away")
        return httpx.Response(200)

    def wait(seconds: float) -> bool:
        nonlocal now
        now += int(seconds)
        if now == 3:
            client._hold("c")
        if now == 11:
            client.release(RolloutBatch("c", ()))
        return now == 16

    client = client_of(answer)
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(client, "_closing", SimpleNamespace(wait=wait))
    client._hold("a")
    client._hold("b")
    client._keep()
    # a and b until 8, then until 14, then until 19; c until 11, then until 16
    assert extended == [
        *((5, "a/extend"), (6, "a/extend"), (6, "b/extend"), (8, "c/extend")),
        *((11, "c/release"), (11, "a/extend"), (11, "b/extend")),
    ]


@pytest.mark.parametrize(("seconds", "ends"), [(86_400.0, False), (4.0, True)])
def test_client_counts_no_time_for_which_the_trainer_was_stopped(
    seconds: float, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests within the 14 s of `--rollout-timeout`: a stop of a day during two of them, or 4 s for each."""
    now, requests = [0.0], itertools.count()
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(client_module, "running_time", signals.RunningTime())

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/batch" and (next(requests) < 2 or ends):
            now[0] += seconds
        return httpx.Response(200, content=NO_BATCH, headers={"content-type": wire.MSGPACK})

    client, asked = client_of(answer, rollout_timeout=14.0), iter(range(5))
    with pytest.raises(TrainingError if ends else StopIteration) as ended:
        client.lease(lambda: print(next(asked)))
    assert not ends or getattr(ended.value, "field", "") == "--rollout-timeout"
