"""`POST /generate`: tokens in, tokens and their logprobs out."""

from typing import Any

import msgspec


class TokenPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tokenised prompt; `prompt_token_ids` must not be empty."""

    prompt_token_ids: list[int]


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /generate`. On the wire the body is flat: the keys of `sampling` are next to `prompt`.

    `sampling` holds vLLM's SamplingParams by their own names (`n`, `max_tokens`, `temperature`, `stop`, `seed`,
    `logprobs`, `prompt_logprobs`, …). `model` or `policy_version` selects a version. Without them, or with the served
    model's name, the newest version answers.
    """

    prompt: str | TokenPrompt
    stream: bool = False
    model: str | None = None
    policy_version: int | None = None
    sampling: dict[str, Any] = {}

    def to_body(self) -> dict[str, Any]:
        """Return the flat JSON object for the wire."""
        prompt = self.prompt if isinstance(self.prompt, str) else msgspec.to_builtins(self.prompt)
        routing = {
            "stream": self.stream or None,
            "model": self.model,
            "policy_version": self.policy_version,
        }
        return self.sampling | {"prompt": prompt} | {key: v for key, v in routing.items() if v is not None}

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> "GenerateRequest":
        """Return the request in a flat body. Any sampling key is accepted here, because the known ones depend on vLLM.

        Raises:
            msgspec.ValidationError: a routing key is missing or has the wrong type; the message names it.
        """
        routing = {"prompt", "stream", "model", "policy_version"}
        head = {key: value for key, value in body.items() if key in routing}
        sampling = {key: value for key, value in body.items() if key not in routing}
        return msgspec.convert(head | {"sampling": sampling}, cls)


TokenLogprobs = dict[int, float]
"""Maps a token id (a string on the wire) to its logprob, natural log, in the distribution that was sampled from."""


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of `/generate`; lists run over the `n` completions.

    `logprobs[out][pos]` is a list of one object `{"<token id>": logprob}` whose first key is the sampled token. With
    `logprobs: 0` it is the only key; with `logprobs: k` the k likeliest tokens follow. `prompt_logprobs[pos]` is null
    at the first position. `token_ids` includes the stop token if one ended the completion. `policy_version` is the
    version at the request's start. If shared weights changed during the request, `policy_version_end` is the version at
    its end, and the completions are a mixture of both.
    `routed_experts` (base64 in JSON; `protocol/routed_experts.py`) has for each completion the experts of all tokens,
    prompt included, but for the last; it is absent unless the server was started with `--return-routed-experts`.
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
    routed_experts: list[bytes] | None = None


class GenerateChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a streamed `/generate` (newline-delimited JSON): the new tokens of completion `index`.

    `finish_reason` is set in a completion's last chunk. `policy_version_end` is set if shared weights have changed
    since
    the request began: the version at that moment.
    """

    index: int
    text: str
    token_ids: list[int]
    policy_version: int
    model: str
    finish_reason: str | None = None
    logprobs: list[list[TokenLogprobs]] | None = None
    policy_version_end: int | None = None
