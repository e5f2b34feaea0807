"""End each request whose forward pass gave logits that are not finite, and mark its version unhealthy.

vLLM's workers count such logits (`worker/finite.py` marks them), and each token carries its count. The check runs where
vLLM starts to process outputs, before tokens become text. No route therefore returns any part of such an output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_server import compat, seams

NOT_FINITE = "a forward pass gave logits that are not finite"


def assert_seams() -> None:
    """Check the seams that this module and `worker/finite.py` use, as `compat.assert_seams` does.

    Raises:
        FatalError: names what this vLLM does not have.
    """
    output = seams.found("vllm.v1.engine", "EngineCoreOutput")
    seams.found("vllm.v1.engine", "FinishReason")
    if "num_nans_in_logits" not in output.__struct_fields__ or output.__struct_config__.frozen:
        raise seams.moved("EngineCoreOutput.num_nans_in_logits")
    compat.assert_callable("vllm.v1.engine.output_processor", "OutputProcessor", {"process_outputs": ()})
    seams.found("vllm.v1.kv_cache_interface", "KVCacheConfig", "needs_kv_cache_zeroing")


@dataclass
class OutputWatch:
    """Checks all outputs of the engine.

    Args:
        processor: vLLM's OutputProcessor, which passes outputs to the waiting requests.
        condemn: called with the name of the adapter whose logits were not finite; None for the base model.
    """

    processor: Any
    condemn: Callable[[str | None], None]
    _older: frozenset[str] = frozenset()

    def start(self) -> None:
        """Start checking."""
        vllms = self.processor.process_outputs

        def process_outputs(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            running = [output.request_id for output in outputs if _is_unsound(output) and self._end(output)]
            processed = vllms(outputs, *args, **kwargs)
            processed.reqs_to_abort.extend(running)  # vLLM aborts them in the engine
            return processed

        self.processor.process_outputs = process_outputs

    def weights_changed(self) -> None:
        """Remember the in-flight requests: their KV cache is of the old weights and says nothing about the new ones."""
        self._older = frozenset(self.processor.request_states)

    def _end(self, output: Any) -> bool:
        """Turn the output into an error that ends the request. Return whether the engine still runs the request."""
        state = self.processor.request_states.get(output.request_id)
        if state is None:
            return False
        if output.request_id not in self._older:
            self.condemn(state.lora_name)
        runs = output.finish_reason is None
        output.stop_reason = NOT_FINITE  # distinguishes this end from an error caused by the request
        output.finish_reason = seams.found("vllm.v1.engine", "FinishReason").ERROR
        output.new_token_ids, output.new_logprobs, output.new_prompt_logprobs_tensors = [], None, None
        return runs


def _is_unsound(output: Any) -> bool:
    prompt = output.new_prompt_logprobs_tensors
    return output.num_nans_in_logits > 0 or (prompt is not None and bool(prompt.logprobs.isnan().any()))
