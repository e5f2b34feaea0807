"""Outputs of the engine whose logits were not finite, on a stand-in for vLLM's output processor."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsTensors

from vllm_server.soundness import NOT_FINITE, OutputWatch


class Processor:
    """Remembers what comes to it; aborts what is said to have met a stop string."""

    def __init__(self, **adapters: str | None) -> None:
        self.request_states = {name: SimpleNamespace(lora_name=adapter) for name, adapter in adapters.items()}
        self.seen: list[EngineCoreOutput] = []

    def process_outputs(self, outputs: Sequence[EngineCoreOutput], time: float, *, stopped: str = "") -> Any:
        self.seen += outputs
        return SimpleNamespace(reqs_to_abort=[stopped] if stopped else [])


def output(request: str, nans: int = 0, **more: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=request, new_token_ids=[7], num_nans_in_logits=nans, **more)


def watched(processor: Processor) -> tuple[OutputWatch, list[str | None]]:
    condemned: list[str | None] = []
    watch = OutputWatch(processor, condemned.append)
    watch.start()
    return watch, condemned


def test_sound_outputs_pass_as_they_are() -> None:
    processor = Processor(a="v1")
    _, condemned = watched(processor)
    done = processor.process_outputs([output("a")], 1.0, stopped="b")
    assert (processor.seen, done.reqs_to_abort, condemned) == ([output("a")], ["b"], [])


def test_an_unsound_one_ends_its_request_by_an_error_and_its_version_is_named() -> None:
    processor = Processor(a="v1", b=None, c="v2", d="v3")
    _, condemned = watched(processor)
    last = output("b", 2, finish_reason=FinishReason.LENGTH)
    done = processor.process_outputs([output("a", 1), last, output("c"), output("gone", 1)], 1.0, stopped="c")
    assert condemned == ["v1", None]
    assert done.reqs_to_abort == ["c", "a"]  # the engine has ended b itself, and knows nothing of "gone"
    ended = {each.request_id: (each.finish_reason, each.new_token_ids) for each in processor.seen}
    assert ended["a"] == ended["b"] == (FinishReason.ERROR, [])
    assert ended["c"] == (None, [7])
    assert [each.stop_reason for each in processor.seen[:3]] == [NOT_FINITE, NOT_FINITE, None]


def test_so_does_a_prompt_whose_logprobs_are_nan() -> None:
    processor = Processor(a="v1", b="v2")
    _, condemned = watched(processor)
    for request, value in (("a", float("nan")), ("b", float("-inf"))):
        one = torch.tensor([[value]])
        tensors = LogprobsTensors(torch.zeros(1, 1), one, torch.zeros(1))
        processor.process_outputs([output(request, new_prompt_logprobs_tensors=tensors)], 1.0)
    assert condemned == ["v1"]
    assert processor.seen[0].new_prompt_logprobs_tensors is None


def test_a_request_from_before_an_update_condemns_nobody() -> None:
    processor = Processor(old=None)
    watch, condemned = watched(processor)
    watch.weights_changed()
    processor.request_states["new"] = SimpleNamespace(lora_name=None)
    processor.process_outputs([output("old", 1)], 1.0)
    assert condemned == [] and processor.seen[0].finish_reason == FinishReason.ERROR
    processor.process_outputs([output("new", 1)], 1.0)
    assert condemned == [None]
