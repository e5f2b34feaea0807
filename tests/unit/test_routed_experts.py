"""Routed experts on their way: vLLM's structures, the server's answer, a conversation, the rollout API, the trainer."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from environments.api import groups, wire
from environments.peers.inference import Completion
from environments.trajectory import Trajectory, scored_group
from grpo_trainer.rollouts.filter import misfit
from grpo_trainer.rollouts.groups import to_group
from vllm_server import generate, output_blocks
from vllm_server.errors import FatalError, ServeError
from vllm_server.protocol import WorkerInfo
from vllm_server.protocol.routed_experts import RoutedShape, joined, pack
from vllm_server.worker.routed_experts import Record, RoutedTensors, _attach, _attends_to_all, _keep

SHAPE = RoutedShape(layers=3, top_k=1, experts=8)


def rows(*values: int) -> bytes:
    """Of each token the value in the first layer, and the next ones in the others."""
    return bytes(each for value in values for each in (value, value + 1, value + 2))


# ---------------------------------------------------------------- the format


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 256, 257, 1000]), st.integers(0, 5), st.data())
def test_what_is_sent_is_what_was_chosen(
    layers: int, top_k: int, experts: int, tokens: int, data: st.DataObject
) -> None:
    shape = RoutedShape(layers, top_k, experts)
    size = tokens * layers * top_k
    ids = np.array(data.draw(st.lists(st.integers(0, experts - 1), min_size=size, max_size=size)), np.int64)
    raw = ids.astype("<u1" if shape.id_bytes == 1 else "<u2").tobytes()
    group = wire.pack(wire.ScoredData(tokens=[[1, 2]], masks=[[-100, 2]], scores=[0.0]))
    (sample,) = to_group(msgspec.structs.replace(group, routed_experts=[pack(shape, raw)])).samples
    found = sample.experts
    assert found is not None and found.shape == shape and found.ids_TLK.shape == (tokens, layers, top_k)
    assert found.ids_TLK.reshape(-1).tolist() == ids.tolist()
    assert len(raw) == tokens * shape.row_bytes


@pytest.mark.parametrize("data", [b"abc", pack(SHAPE, b"ab"), pack(SHAPE, rows(7)), pack(RoutedShape(0, 1, 8), b"")])
def test_other_bytes_are_refused(data: bytes) -> None:
    group = wire.pack(wire.ScoredData(tokens=[[1, 2]], masks=[[-100, 2]], scores=[0.0]))
    (sample,) = to_group(msgspec.structs.replace(group, routed_experts=[data])).samples
    assert sample.experts is None and sample.bent is not None and sample.bent.field == "routed_experts"


def test_turns_of_a_conversation() -> None:
    """A later turn's request computes earlier tokens again, or reads them from the cache: the first choice counts."""
    first, second = pack(SHAPE, rows(1, 2)), pack(SHAPE, rows(5, 5, 3, 4))
    assert joined([first, second]) == pack(SHAPE, rows(1, 2, 3, 4))
    assert joined([first, None]) is None and joined([]) is None
    assert joined([first, pack(RoutedShape(1, 3, 8), rows(1))]) is None


# ---------------------------------------------------------------- from the worker to the server's process


def runner_of(blocks: list[list[int]], names: list[str], seen: Mapping[str, int]) -> Any:
    """A model runner with KV blocks of two tokens."""
    table = SimpleNamespace(block_size=2, get_numpy_array=lambda: np.array(blocks, np.int32))
    table.slot_mapping = SimpleNamespace(gpu=torch.zeros(8, dtype=torch.int64))
    batch = SimpleNamespace(req_ids=names, num_logprobs=dict.fromkeys(names, 0), block_table=[table])
    return SimpleNamespace(
        device="cpu",
        input_batch=batch,
        discard_request_mask=SimpleNamespace(np=np.zeros(len(names), bool)),
        optimistic_seq_lens_cpu=torch.tensor([seen[name] for name in names]),
    )


def logprobs(requests: int) -> LogprobsTensors:
    ids = torch.arange(requests, dtype=torch.int32)[:, None]
    return LogprobsTensors(ids, -ids.float() - 1, torch.ones(requests, dtype=torch.int32))


def step(runner: Any, record: Record, slots: list[int], first: list[int], finished: tuple[str, ...] = ()) -> None:
    """The forward pass of a step: tokens at these slots, whose experts begin with these."""
    table = runner.input_batch.block_table[0]
    table.slot_mapping.gpu[: len(slots)] = torch.tensor(slots)
    for layer in range(3):
        record.note(layer, torch.tensor(first)[:, None] + layer)
    _keep(runner, record, SimpleNamespace(finished_req_ids=set(finished), total_num_scheduled_tokens=len(slots)))


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(LogprobsProcessor, "_update_sample_logprobs", LogprobsProcessor._update_sample_logprobs)
    output_blocks.collect_experts()
    return LogprobsProcessor


def received(steps: list[LogprobsTensors], request: int, processor: Any) -> Any:
    """The logprobs of a request at the server, after all steps; each passes processes as vLLM lets it."""
    state = processor(None, FlatLogprobs(), None, 0.0, 0, None)
    for one in steps:
        lists = pickle.loads(pickle.dumps(one.to_cpu_nonblocking().tolists()))  # a worker in its own process
        output = EngineCoreOutput(request_id="r", new_token_ids=[7], new_logprobs=lists.slice_request(request, 1))
        (got,) = (
            MsgpackDecoder(EngineCoreOutputs)
            .decode(MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output])))
            .outputs
        )
        state.update_from_output(got)
    return state.logprobs


def test_prompts_in_parts_and_cached_ones(processor: Any) -> None:
    """Request b's prompt begins with a block of a's, which is cached; a's is computed in two steps."""
    record = Record(SHAPE, torch.zeros(8, 3, 1, dtype=torch.int16), torch.zeros(16, 3, 1, dtype=torch.int16))
    runner = runner_of([[3, 1], [3, 6]], ["a", "b"], {"a": 3, "b": 3})
    step(runner, record, [6, 7], [0, 1])  # a: its first two tokens
    runner.discard_request_mask.np[:] = True
    part = _attach(runner, record, logprobs(2))
    assert isinstance(part, RoutedTensors) and not part.rows_M.numel()
    runner.discard_request_mask.np[:] = False
    step(runner, record, [2, 12], [2, 3])  # a's third, and b's third
    steps = [_attach(runner, record, logprobs(2))]
    runner.optimistic_seq_lens_cpu += 1
    step(runner, record, [3, 13], [4, 5])
    steps.append(_attach(runner, record, logprobs(2)))
    assert output_blocks.experts_of(received(steps, 0, processor), SHAPE, 4) == pack(SHAPE, rows(0, 1, 2, 4))
    assert output_blocks.experts_of(received(steps, 1, processor), SHAPE, 4) == pack(SHAPE, rows(0, 1, 3, 5))
    step(runner, record, [], [], finished=("a",))
    assert record.sent == {"b": 4}


def test_a_lost_row_is_noticed(processor: Any) -> None:
    got = received([logprobs(1)], 0, processor)
    with pytest.raises(ServeError) as caught:
        output_blocks.experts_of(got, SHAPE, 1)
    assert caught.value.field == "routed_experts"


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"routed_experts": None}, "qwen2"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"decode_context_parallel_size": 2}, "decode_context"),
        ({"kv_transfer_config": SimpleNamespace()}, "a KV connector"),
    ],
)
def test_a_server_that_records_none_does_not_start(change: dict[str, Any], got: str) -> None:
    kinds = ("data", "pipeline", "decode_context", "prefill_context")
    sizes = {f"{kind}_parallel_size": 1 for kind in kinds}
    parallel = SimpleNamespace(**sizes | {key: value for key, value in change.items() if key in sizes})
    text = SimpleNamespace(hf_text_config=SimpleNamespace(model_type="qwen2"))
    connector = change.get("kv_transfer_config")
    config = SimpleNamespace(
        parallel_config=parallel, speculative_config=None, kv_transfer_config=connector, model_config=text
    )
    worker = WorkerInfo(rank=0, gpu_uuid="", visible_gpus=[], routed_experts=change.get("routed_experts", SHAPE))
    with pytest.raises(FatalError) as caught:
        output_blocks.check_experts(config, [worker])
    assert got in caught.value.problems[0].got


def test_an_answer_that_was_aborted_has_none() -> None:
    """One that was aborted before its first token has no rows, not even of its prompt; environments ask again."""
    server: Any = SimpleNamespace(routed_shape=SHAPE)
    output = SimpleNamespace(finish_reason="abort", token_ids=[], logprobs=SimpleNamespace())
    final = SimpleNamespace(prompt_token_ids=[1, 2], outputs=[output])
    assert generate._experts(server, final) is None  # pyright: ignore[reportPrivateUsage]
    output.finish_reason = "stop"
    with pytest.raises(ServeError):
        generate._experts(server, final)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("windows", "recorded"), [([None], True), ([8], False), ([None, 8], False)])
def test_only_layers_that_keep_all_tokens_are_recorded(windows: list[int | None], recorded: bool) -> None:
    """`windows`: of the layers of a group of KV caches."""
    more: dict[str, Any] = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs: Any = {
        str(number): FullAttentionSpec(**more) if window is None else SlidingWindowSpec(**more, sliding_window=window)
        for number, window in enumerate(windows)
    }
    spec = SimpleNamespace(kv_cache_specs=specs) if len(specs) > 1 else specs["0"]
    assert _attends_to_all(spec) == recorded


# ---------------------------------------------------------------- from the environment to the trainer


def completion(routed: bytes | None) -> Completion:
    return Completion([4, 5], [6, 7], [-0.5, -0.25], "", "stop", 1, routed_experts=routed)


def group_of(*completions: Completion) -> Any:
    data = scored_group([Trajectory.of(each, float(score)) for score, each in enumerate(completions)])
    kept = groups.read(wire.encode_group(data), wire.MSGPACK)
    return to_group(wire.decode(kept.payload, wire.PackedGroup, wire.MSGPACK))


@pytest.mark.parametrize(
    ("routed", "got"),
    [
        (None, "none"),
        (pack(SHAPE, rows(1, 2)), "experts of 2 tokens"),
        (pack(RoutedShape(1, 3, 8), rows(1, 2, 3)), "3 of 8 experts in 1 layers"),
        (pack(SHAPE, b"a"), "1 bytes of rows of 3"),
    ],
)
def test_what_can_not_be_replayed_is_left_out(routed: bytes | None, got: str) -> None:
    group = group_of(completion(pack(SHAPE, rows(1, 2, 3))), completion(routed))
    problem = misfit(group, routed=SHAPE)
    assert problem is not None and problem.field == "sequence 1: routed_experts" and problem.got == got
    if routed is None:
        assert misfit(group) is None  # nobody replays
        imitated = replace(group, samples=(group.samples[0], replace(group.samples[1], supervised=True)))
        assert misfit(imitated, routed=SHAPE) is None
