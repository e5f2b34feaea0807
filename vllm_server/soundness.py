"""Requests whose forward pass gave logits that are not finite: each ends by an error, and its version is unhealthy.

vLLM's workers count such logits (`worker/finite.py` marks them), and the count comes with each token. It is looked at
where vLLM's own outputs begin, before a token of it is text: whichever route asked, none of it is answered.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_server import compat

NOT_FINITE = "a forward pass gave logits that are not finite"


def assert_seams() -> None:
    """As `compat.assert_seams`, for what is used here and in `worker/finite.py`.

    Raises:
        FatalError: names what this vLLM does not have.
    """
    output = compat.seam(("vllm.v1.engine",), "EngineCoreOutput", "FinishReason").EngineCoreOutput
    if "num_nans_in_logits" not in output.__struct_fields__ or output.__struct_config__.frozen:
        raise compat.moved("EngineCoreOutput.num_nans_in_logits")
    compat.assert_callable("vllm.v1.engine.output_processor", "OutputProcessor", {"process_outputs": ()})
    config = compat.seam(("vllm.v1.kv_cache_interface",), "KVCacheConfig").KVCacheConfig
    if not hasattr(config, "needs_kv_cache_zeroing"):
        raise compat.moved("KVCacheConfig.needs_kv_cache_zeroing")


@dataclass
class OutputWatch:
    """Looks at all that the engine puts out.

    Args:
        processor: vLLM's OutputProcessor, which hands outputs to the requests that wait for them.
        condemn: told the name of the adapter whose logits were not finite; None: the base model's.
    """

    processor: Any
    condemn: Callable[[str | None], None]
    _older: frozenset[str] = frozenset()

    def start(self) -> None:
        """Look from now on."""
        vllms = self.processor.process_outputs

        def process_outputs(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            running = [output.request_id for output in outputs if _is_unsound(output) and self._end(output)]
            processed = vllms(outputs, *args, **kwargs)
            processed.reqs_to_abort.extend(running)  # vLLM tells the engine
            return processed

        self.processor.process_outputs = process_outputs

    def weights_changed(self) -> None:
        """What runs now has a cache of weights that are gone: what comes of it is not the new ones' fault."""
        self._older = frozenset(self.processor.request_states)

    def _end(self, output: Any) -> bool:
        """Make it the request's end, by an error; whether the engine still runs the request."""
        state = self.processor.request_states.get(output.request_id)
        if state is None:
            return False
        if output.request_id not in self._older:
            self.condemn(state.lora_name)
        runs = output.finish_reason is None
        output.stop_reason = NOT_FINITE  # tells this end from an error of the request's own
        output.finish_reason = importlib.import_module("vllm.v1.engine").FinishReason.ERROR
        output.new_token_ids, output.new_logprobs, output.new_prompt_logprobs_tensors = [], None, None
        return runs


def _is_unsound(output: Any) -> bool:
    prompt = output.new_prompt_logprobs_tensors
    return output.num_nans_in_logits > 0 or (prompt is not None and bool(prompt.logprobs.isnan().any()))
