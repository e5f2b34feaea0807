"""`POST /generate`: tokens in, tokens and their logprobs out."""

from typing import Any

import msgspec


class TokenPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt that is tokenised already; `prompt_token_ids` must not be empty."""

    prompt_token_ids: list[int]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate`. On the wire the body is flat: `sampling`'s keys stand beside `prompt`.

    `sampling` holds vLLM's SamplingParams by their own names (`n`, `max_tokens`, `temperature`, `stop`,
    `seed`, `logprobs`, `prompt_logprobs`, …). `model` or `policy_version` pins a version; without them, or
    with the served model's name, the newest version answers.
    """

    prompt: str | TokenPrompt
    stream: bool = False
    model: str | None = None
    policy_version: int | None = None
    sampling: dict[str, Any] = {}

    def to_body(self) -> dict[str, Any]:
        """The flat JSON object that goes over the wire."""
        prompt = self.prompt if isinstance(self.prompt, str) else msgspec.to_builtins(self.prompt)
        routing = {"stream": self.stream or None, "model": self.model, "policy_version": self.policy_version}
        return self.sampling | {"prompt": prompt} | {key: v for key, v in routing.items() if v is not None}

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> "GenerateRequest":
        """Split a flat body; which sampling keys are known depends on the server's vLLM, so any may come.

        Raises:
            msgspec.ValidationError: a routing key is missing or has the wrong type; the message names it.
        """
        routing = {"prompt", "stream", "model", "policy_version"}
        head = {key: value for key, value in body.items() if key in routing}
        sampling = {key: value for key, value in body.items() if key not in routing}
        return msgspec.convert(head | {"sampling": sampling}, cls)


TokenLogprobs = dict[int, float]
"""Token id (text on the wire) to its logprob, natural log, of the distribution that was sampled from."""


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of `/generate`; lists run over the `n` completions.

    `logprobs[out][pos]` is a list of one object `{"<token id>": logprob}` whose first key is the sampled
    token (asked with `logprobs: 0` it is the only one; with `logprobs: k` the k likeliest follow).
    `prompt_logprobs[pos]` is null at the first position. `token_ids` includes the stop token that ended a
    completion, if one did. `policy_version` is the version that the request began with; if shared weights changed
    while it ran, `policy_version_end` is the one that it ended with, and the completions are a mixture.
    """

    text: list[str]
    prompt: str | None
    finish_reasons: list[str | None]
    policy_version: int
    model: str
    prompt_token_ids: list[int]
    token_ids: list[list[int]]
    logprobs: list[list[list[TokenLogprobs]]] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    policy_version_end: int | None = None


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a streamed `/generate` (newline-delimited JSON): what completion `index` gained.

    A completion has ended when its `finish_reason` is there. `policy_version_end` is there once shared weights have
    changed since the request began: the version by then.
    """

    index: int
    text: str
    token_ids: list[int]
    policy_version: int
    model: str
    finish_reason: str | None = None
    logprobs: list[list[TokenLogprobs]] | None = None
    policy_version_end: int | None = None
