"""Masks on their way through vLLM: from its samplers, in its own structures, to the server's answer."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from grpo_common.errors import Problem
from grpo_trainer.rollouts.sampling_masks import decode
from vllm_server import sampling_masks as collected
from vllm_server.errors import ServeError
from vllm_server.sampling import check_masks
from vllm_server.worker import sampling_masks
from vllm_server.worker.sampling_masks import MODE, KeptTensors, bits_of, gives_masks, kept_ids


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4), st.integers(1, 40))
def test_bits_and_ids(some: list[list[bool]], times: int) -> None:
    """For any size of a vocabulary, also one that fills no whole word."""
    kept_NV = torch.tensor(some).repeat(1, times)
    bits_NW = bits_of(torch.where(kept_NV, -0.5, -torch.inf)).numpy()
    assert bits_NW.dtype == np.uint8 and bits_NW.shape[1] % 8 == 0
    # a row from which nothing is left out has no bits
    assert by_row(bits_NW) == [[] if row.all() else row.nonzero()[:, 0].tolist() for row in kept_NV]


def by_row(bits_NW: Any) -> list[list[int]]:
    """The kept ids of each row."""
    ids, ends = kept_ids(np.asarray(bits_NW))
    return [row.tolist() for row in np.split(ids, ends[1:-1])]


def tensors(sampled: list[int], more: int = 0) -> LogprobsTensors:
    """Logprobs of sampled tokens, and of a number of others."""
    ids = torch.tensor([[token, *range(more)] for token in sampled], dtype=torch.int32)
    return LogprobsTensors(ids, -ids.float() - 1, torch.ones(len(sampled), dtype=torch.int32))


def kept_tensors(processed: list[list[float]], sampled: list[int], more: int = 0) -> KeptTensors:
    processed_NV = torch.tensor(processed)
    return KeptTensors.of(tensors(sampled, more), bits_of(processed_NV))


OUT = -torch.inf
STEPS = [
    # three requests; the second leaves nothing out
    kept_tensors([[-1.0, OUT, -0.5, OUT], [-1.0] * 4, [OUT, OUT, OUT, 0.0]], [2, 1, 3]),
    kept_tensors([[OUT, 0.0, OUT, OUT], [-1.0] * 4, [-1.0, -1.0, OUT, OUT]], [1, 0, 0]),
]


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's LogprobsProcessor, as the server's process has it; afterwards it is vLLM's own again."""
    monkeypatch.setattr(LogprobsProcessor, "_update_sample_logprobs", LogprobsProcessor._update_sample_logprobs)
    collected.collect()
    return LogprobsProcessor


def received(made: Any, request: int, processor: Any, *, flat: bool = True) -> Any:
    """The logprobs of a request at the server, after all steps; each passes processes as vLLM lets it."""
    state = processor(None, FlatLogprobs() if flat else [], None, 0.0, 0, None)
    for step in made:
        lists = pickle.loads(pickle.dumps(step.to_cpu_nonblocking().tolists()))  # a worker in its own process
        output = EngineCoreOutput(request_id="r", new_token_ids=[7], new_logprobs=lists.slice_request(request, 1))
        sent = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output]))
        (got,) = MsgpackDecoder(EngineCoreOutputs).decode(sent).outputs
        state.update_from_output(got)
    return state.logprobs


def test_each_request_gets_its_own_masks(processor: Any) -> None:
    kept = [collected.kept_of(received(STEPS, request, processor)) for request in range(3)]
    assert [{place: ids.tolist() for place, ids in one.items()} for one in kept] == [
        {0: [0, 2], 1: [1]},
        {0: [], 1: []},
        {0: [3], 1: [0, 1]},
    ]
    masks = decode(collected.encode(kept[0], 2), 2)
    assert masks.counts_T.tolist() == [2, 1] and masks.ids_M.tolist() == [0, 2, 1]


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "dictionaries"])
def test_logprobs_are_the_same_as_without_masks(processor: Any, flat: bool) -> None:
    made = [kept_tensors([[-1.0, OUT, -0.5, OUT]], [2], more=2)]
    plain = [tensors([2], more=2)]
    got, wanted = (received(steps, 0, processor, flat=flat) for steps in (made, plain))
    assert [*got] == [*wanted]


def test_plain_sampling_carries_nothing(processor: Any) -> None:
    logprobs = received([tensors([5])], 0, processor)
    assert vars(logprobs).keys() == vars(FlatLogprobs()).keys() and not collected.kept_of(logprobs)
    assert type(tensors([5]).tolists()) is LogprobsLists


# ---------------------------------------------------------------- vLLM's samplers


def metadata(n: int, **changes: Any) -> SamplingMetadata:
    nothing = torch.zeros(n)
    fields: dict[str, Any] = {
        "temperature": torch.full((n,), 0.5),
        "all_greedy": False,
        "all_random": True,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": 0,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": nothing,
        "presence_penalties": nothing,
        "repetition_penalties": nothing,
        "output_token_ids": [[]] * n,
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors([]),
    }
    return SamplingMetadata(**fields | changes)


def watched_sampler(mode: Any = MODE) -> Any:
    """vLLM's sampler of the older model runner, prepared; the class itself stays vLLM's."""
    # vLLM's own compiles a kernel for the ranks
    gather = staticmethod(lambda logprobs, count, token_ids: tensors(token_ids.tolist()))
    kind = type("Watched", (Sampler,), {"gather_logprobs": gather})
    sampling_masks._watch(kind, "forward", sampling_masks._cut_by_metadata)
    return kind(logprobs_mode=mode)


LOGITS = torch.tensor([[3.0, 0.0, 2.0, 1.0, -1.0], [0.0, 5.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"top_k": torch.tensor([2, 5], dtype=torch.int32)}, [[0, 2], []]),
        # at temperature 0.5 the first row's probabilities are 0.865, 0.002, 0.117, 0.016, 0.0003
        ({"top_p": torch.tensor([0.9, 0.5])}, [[0, 2], [1]]),
    ],
    ids=["top_k", "top_p"],
)
def test_what_the_sampler_keeps_is_kept(changes: dict[str, Any], wanted: list[list[int]]) -> None:
    sampler = watched_sampler()
    made = sampler(LOGITS.clone(), metadata(2, **changes)).logprobs_tensors
    assert by_row(made.bits_NW) == wanted
    assert all(int(made[0][row, 0]) in kept for row, kept in enumerate(wanted) if kept)
    assert gives_masks(sampler)


@pytest.mark.parametrize("mode", [MODE, "raw_logprobs"])
def test_a_plain_batch_has_no_bits(mode: str) -> None:
    top_k = torch.tensor([2, 2], dtype=torch.int32)
    sampler = watched_sampler(mode)
    for changes in ({}, {"top_k": top_k, "max_num_logprobs": None}, *([{"top_k": top_k}] if mode != MODE else [])):
        made = sampler(LOGITS.clone(), metadata(2, **changes)).logprobs_tensors
        assert made is None or type(made) is LogprobsTensors
    assert gives_masks(sampler) == (mode == MODE) and not gives_masks(Sampler(logprobs_mode=MODE))


class NewerSampler:
    """The parts of the newer model runner's sampler that matter: its kernels need a GPU."""

    logprobs_mode = MODE

    def __init__(self, **params: Any) -> None:
        plain = {"top_k": np.array([3, 4, 4]), "top_p": np.ones(3, np.float32), "min_p": np.zeros(3, np.float32)}
        states = {name: SimpleNamespace(np=value) for name, value in (plain | params).items()}
        self.sampling_states = SimpleNamespace(vocab_size=4, num_logprobs=np.array([0, 0, -1]), **states)

    def __call__(self, logits: torch.Tensor, rows: Any) -> Any:
        sampled, _ = self.sample(logits, torch.tensor(rows), np.array(rows), return_logprobs=True)
        return SimpleNamespace(logprobs_tensors=tensors(sampled.tolist()))

    def sample(self, logits: torch.Tensor, idx_mapping: Any, idx_mapping_np: Any, return_logprobs: bool) -> Any:
        return logits.argmax(-1), logits


@pytest.mark.parametrize(
    ("params", "rows", "wanted"),
    [
        ({}, [1, 0], True),
        ({}, [1], False),  # row 0 leaves tokens out, and is not in the batch
        ({"top_p": np.array([1, 0.5, 1])}, [1], True),
        ({"min_p": np.array([0, 0.1, 0])}, [1], True),
        ({"top_k": np.array([4, 4, 1])}, [2], False),  # without logprobs
    ],
)
def test_so_does_the_newer_model_runners(params: dict[str, Any], rows: list[int], wanted: bool) -> None:
    kind = type("Watched", (NewerSampler,), {})
    sampling_masks.watch_newer(kind)
    sampler = kind(**params)
    made = sampler(torch.tensor([[0.0, 1.0, OUT, OUT]] * len(rows)), rows).logprobs_tensors
    assert isinstance(made, KeptTensors) == wanted and gives_masks(sampler)
    if wanted:
        assert by_row(made.bits_NW) == [[0, 1]] * len(rows)


# ---------------------------------------------------------------- requests


def test_plain_requests_need_no_masks() -> None:
    why_not = Problem("sampling_masks", "no sampler")
    assert not check_masks({"temperature": 0.7, "logprobs": 0}, stream=False, why_not=why_not)
    assert check_masks({"top_k": 5, "logprobs": 0}, stream=False, why_not=None)


@pytest.mark.parametrize(
    ("sampling", "stream", "field"),
    [
        ({"top_p": 0.9, "logprobs": 0}, True, "sampling_masks"),
        ({"top_p": 0.9, "logprobs": 0, "prompt_logprobs": 0}, False, "sampling_masks"),
        ({"top_p": 0.9}, False, "logprobs"),
        ({"top_p": 0.9, "logprobs": 0, "temperature": 0}, False, "temperature"),
        ({"top_p": 0.9, "logprobs": 0, "presence_penalty": 1}, False, "presence_penalty"),
        ({"logprobs": 0, "min_tokens": 3}, False, "min_tokens"),
    ],
)
def test_requests_whose_masks_would_not_help_are_refused(sampling: Any, stream: bool, field: str) -> None:
    with pytest.raises(ServeError) as caught:
        check_masks(sampling, stream=stream, why_not=None)
    assert caught.value.status == 422 and caught.value.field == field and caught.value.fix


def test_a_server_without_masks_says_why() -> None:
    why_not = Problem("sampling_masks", "no sampler", "another", "change it")
    with pytest.raises(ServeError) as caught:
        check_masks({"top_p": 0.9, "logprobs": 0}, stream=False, why_not=why_not)
    assert (caught.value.got, caught.value.wanted, caught.value.fix) == ("no sampler", "another", "change it")
