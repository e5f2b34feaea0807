"""Convert a request's sampling keys to vLLM's SamplingParams; refuse unknown keys."""

import re
from functools import cache
from typing import Any

import msgspec

from grpo_common.suggest import did_you_mean
from vllm_server import seams
from vllm_server.errors import ServeError

# Fields of SamplingParams that the server sets itself, or that would change the answer's structure.
_NOT_FOR_REQUESTS = frozenset(
    {"output_kind", "skip_clone", "output_text_buffer_length", "flat_logprobs", "prompt_logprob_token_ids"}
)
_ROUTING_KEYS = ("prompt", "stream", "model", "policy_version")


@cache
def known_keys() -> frozenset[str]:
    """Return the sampling keys of the installed vLLM."""
    fields = seams.require("vllm.sampling_params", "SamplingParams").__struct_fields__
    return frozenset(name for name in fields if not name.startswith("_")) - _NOT_FOR_REQUESTS


def check_integers(body: dict[str, Any]) -> None:
    """Raise a ServeError, 422, if an integer does not fit the 64 bits of the engine's messages and tensors."""
    for key, value in body.items():
        if _too_large(value):
            raise ServeError(
                422, key, got="an integer beyond 64 bits", wanted="-2**63 to 2**63 - 1", fix="choose a smaller one"
            )


def _too_large(value: object) -> bool:
    if isinstance(value, int):
        return not -(2**63) <= value < 2**63
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list) and any(map(_too_large, value))


def build_sampling_params(sampling: dict[str, Any], *, stream: bool) -> Any:
    """Return vLLM's SamplingParams with these values, and vLLM's defaults for the rest.

    Raises:
        ServeError: 422, an unknown key (the error names the nearest known one), or an illegal value.
    """
    for key in sampling:
        if key not in known_keys():
            known = [*known_keys(), *_ROUTING_KEYS]
            raise ServeError(
                422,
                key,
                got="a key that this server does not know",
                wanted="a sampling parameter of vLLM",
                fix=did_you_mean(key, known, f"known are {', '.join(sorted(known_keys()))}"),
            )
    try:
        params = msgspec.convert(sampling, seams.require("vllm.sampling_params", "SamplingParams"), str_keys=True)
    except seams.request_errors() as error:  # msgspec's are ValueErrors and contain `$.key`; vLLM's name the key
        place = re.search(r"`\$\.(\w+)", str(error))
        field = place.group(1) if place else next((k for k in sampling if k in str(error)), "sampling")
        raise ServeError(
            422, field, got=repr(sampling.get(field, sampling)), wanted=str(error), fix="correct the value"
        ) from error
    if stream and params.prompt_logprobs is not None:
        raise ServeError(
            422,
            "prompt_logprobs",
            got="stream",
            wanted="a request without stream",
            fix="omit stream or prompt_logprobs",
        )
    kinds = seams.require("vllm.sampling_params", "RequestOutputKind")
    params.output_kind = kinds.DELTA if stream else kinds.FINAL_ONLY
    # Flat logprobs are one list for all positions instead of many small objects: faster, and less work for the garbage
    # collector. Not for prompts: the flat form loses the first position's None.
    params.flat_logprobs = params.prompt_logprobs is None
    return params
