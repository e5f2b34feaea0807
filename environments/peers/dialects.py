"""The inference servers that environments support, and how to request token ids and logprobs from each.

| dialect | route | ids and logprobs from |
|---|---|---|
| grpo's own server | `/generate` | `token_ids`, `logprobs` |
| stock vLLM, OpenAI-compatible | `/v1/completions` | `token_ids` (`return_token_ids`), `token_logprobs` |

Text is never tokenised again. A server that returns no ids works for evaluations, but not for training.

Source: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from environments.peers.http import Peer, PeerError, PeerRefused
from grpo_common.formats import check_format
from grpo_common.sampling import cuts
from vllm_server.protocol import FORMAT, GENERATE_ROUTE, GenerateRequest, GenerateResponse, TokenPrompt

COMPLETIONS_ROUTE = "/v1/completions"

_OURS = "the answer of grpo's server"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. The defaults are the plain distribution of the policy.

    Requests turn off nucleus and top-k sampling explicitly. Otherwise servers apply a model's own defaults, and the
    logprobs would be of another distribution than the one sampled from. `top_p`, `top_k` and `min_p` are for
    evaluations: training refuses them (docs/training.md).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def to_body(self) -> dict[str, Any]:
        """Return the sampling keys of vLLM's request bodies."""
        body: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        if self.min_p:  # OpenAI's API does not know it
            body["min_p"] = self.min_p
        stops = {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)}
        return body | {key: value for key, value in stops.items() if value}

    @property
    def cuts(self) -> dict[str, float]:
        """Return the parameters that leave out tokens."""
        return cuts({"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p})


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    Attributes:
        prompt_token_ids: The prompt as the server tokenised it.
        token_ids: The sampled tokens with the end token; empty if the server returns no ids.
        rollout_logprobs: Logprob of each sampled token under the policy that sampled it.
        text: The server's rendering, without special tokens; may be empty if it returns ids.
        finish_reason: ``stop`` or ``length``, by vLLM's names.
        policy_version: Version of the policy that sampled; None if the server has no versions.
        temperature: Temperature of the sampling and of the logprobs.
        cuts: The parameters that left out tokens: `top_p`, `top_k`, `min_p`; training refuses such a completion.
        routed_experts: Experts of each token of prompt and completion but the last (`vllm_server.protocol.
            routed_experts`), if the server returns them.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    rollout_logprobs: list[float]
    text: str
    finish_reason: str
    policy_version: int | None
    temperature: float = 1.0
    cuts: Mapping[str, float] = field(default_factory=dict)
    routed_experts: bytes | None = None


@dataclass(frozen=True, slots=True)
class GrpoServer:
    """`grpo serve`, which returns policy versions. `model` None: the newest version."""

    model: str | None

    async def generate(self, peer: Peer, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """Use `POST /generate`. Request text only if `stop` strings need it: text is half of a token's CPU time."""
        wanted = {"n": n, "logprobs": 0, "detokenize": bool(sampling.stop), **sampling.to_body()}
        request = GenerateRequest(prompt=TokenPrompt(prompt_token_ids), model=self.model, sampling=wanted)
        fix = "start the server with `grpo serve`, or detect its kind with --openai.server_type auto"
        answer, _ = await _post(peer, GENERATE_ROUTE, request.to_body(), GenerateResponse, _OURS, fix)
        if answer.logprobs is None or not len(answer.token_ids) == len(answer.logprobs) == n:
            got = "no logprobs" if answer.logprobs is None else f"{len(answer.token_ids)} completions"
            raise PeerError(field=_route(peer, GENERATE_ROUTE), got=got, wanted=f"logprobs of {n} completions")
        routed_experts = answer.routed_experts or [None] * n
        rows = zip(
            *(answer.token_ids, answer.logprobs, answer.text, answer.finish_reasons, routed_experts), strict=True
        )
        return [
            Completion(
                prompt_token_ids=answer.prompt_token_ids,
                token_ids=token_ids,
                rollout_logprobs=_sampled_logprobs(peer, token_ids, positions),
                text=text,
                finish_reason=finish_reason or "unknown",
                policy_version=answer.policy_version,
                temperature=sampling.temperature,
                cuts=sampling.cuts,
                routed_experts=experts,
            )
            for token_ids, positions, text, finish_reason, experts in rows
        ]

    async def prompt_logprobs(self, peer: Peer, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        """Return the likeliest tokens at each position of a sequence."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
        request = GenerateRequest(prompt=TokenPrompt(token_ids), model=self.model, sampling=sampling)
        answer, _ = await _post(peer, GENERATE_ROUTE, request.to_body(), GenerateResponse, _OURS)
        return answer.prompt_logprobs or []


def _sampled_logprobs(peer: Peer, token_ids: list[int], positions: list[list[dict[int, float]]]) -> list[float]:
    try:
        return [position[0][token_id] for token_id, position in zip(token_ids, positions, strict=True)]
    except (KeyError, IndexError, ValueError):
        raise _not_theirs(peer, GENERATE_ROUTE, len(positions), len(token_ids)) from None


class _Logprob(msgspec.Struct, frozen=True):
    logprob: float


class _TokenLogprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str
    finish_reason: str | None = None
    logprobs: _TokenLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


class _Completions(msgspec.Struct, frozen=True):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class CompletionsServer:
    """Stock vLLM, or another server with OpenAI's routes; ids come by vLLM's `return_token_ids`."""

    model: str

    async def generate(self, peer: Peer, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """Use `POST /v1/completions`, with the prompt as ids."""
        body = {"model": self.model, "prompt": prompt_token_ids, "n": n, "logprobs": 0, "return_token_ids": True}
        choices, headers = await self._choices(peer, body | sampling.to_body(), n)
        version = headers.get("x-policy-version")
        return [
            Completion(
                prompt_token_ids=choice.prompt_token_ids or prompt_token_ids,
                token_ids=choice.token_ids or [],
                rollout_logprobs=_choice_logprobs(peer, choice),
                text=choice.text,
                finish_reason=choice.finish_reason or "unknown",
                policy_version=int(version) if version else None,
                temperature=sampling.temperature,
                cuts=sampling.cuts,
            )
            for choice in choices
        ]

    async def prompt_logprobs(self, peer: Peer, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        """Return the likeliest tokens at each position of a sequence, by vLLM's `prompt_logprobs`."""
        body = {"model": self.model, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": top_k}
        (choice,), _ = await self._choices(peer, body, 1)
        return [
            None if position is None else {token: entry.logprob for token, entry in position.items()}
            for position in choice.prompt_logprobs or []
        ]

    async def _choices(self, peer: Peer, body: dict[str, Any], n: int) -> tuple[list[_Choice], Mapping[str, str]]:
        answer, headers = await _post(peer, COMPLETIONS_ROUTE, body, _Completions, "OpenAI's completions")
        if len(answer.choices) != n:
            raise PeerError(
                field=_route(peer, COMPLETIONS_ROUTE), got=f"{len(answer.choices)} completions", wanted=f"{n}"
            )
        return answer.choices, headers


def _choice_logprobs(peer: Peer, choice: _Choice) -> list[float]:
    if not choice.token_ids:
        return []
    found = choice.logprobs.token_logprobs if choice.logprobs else None
    logprobs = [value for value in found or [] if value is not None]
    if len(logprobs) != len(choice.token_ids):
        raise _not_theirs(peer, COMPLETIONS_ROUTE, len(logprobs), len(choice.token_ids))
    return logprobs


Dialect = GrpoServer | CompletionsServer
"""The requests for one kind of server; `generate` raises as `Peer.request`, and PeerError for an unsound answer."""


@dataclass(frozen=True, slots=True)
class Found:
    """The detected kind of a server.

    Attributes:
        dialect: Its requests.
        description: Its description of itself, for people.
        raw_logprobs: Its logprobs are the model's own, at temperature 1, whatever the sampling temperature.
    """

    dialect: Dialect
    description: str
    raw_logprobs: bool = False


async def find_dialect(peer: Peer, model: str | None) -> Found:
    """Detect the kind of a server; wait for a server that does not answer yet.

    Raises:
        PeerGone: It did not answer within the patience.
        PeerRefused: It requires another key.
        PeerError: It is not a known kind of inference server.
    """
    if "boot_id" in (info := await _ask(peer, "/bridge/info")):
        check_format(f"the inference server at {peer.url}", info, FORMAT, PeerError)
        return Found(GrpoServer(model), f"grpo's own server, policy version {info.get('policy_version')}")
    version = (await _ask(peer, "/version")).get("version")
    models = (await _ask(peer, "/v1/models")).get("data")
    if isinstance(models, list) and models and isinstance(models[0], dict):
        served = model or str(models[0].get("id"))
        known = isinstance(version, str) and models[0].get("owned_by") == "vllm"
        kind = f"vLLM {version}" if known else "an OpenAI-compatible server"
        return Found(CompletionsServer(served), f"{kind} with {served}", raw_logprobs=known)
    raise PeerError(
        field=f"--openai.base_url {peer.url}",
        got="no answer of an inference server",
        wanted="one at /bridge/info (grpo's server) or /v1/models (vLLM, OpenAI-compatible)",
        fix="check the port",
    )


async def _post(
    peer: Peer, path: str, body: dict[str, Any], answer_type: type[T], wanted: str, fix: str = ""
) -> tuple[T, Mapping[str, str]]:
    """Return the answer to a request, and its headers; `wanted` and `fix` are those of the error for another answer."""
    response = await peer.request("POST", path, json=body)
    try:
        return msgspec.json.decode(response.content, type=answer_type), response.headers
    except msgspec.DecodeError as error:
        raise PeerError(field=_route(peer, path), got=error, wanted=wanted, fix=fix) from None


def _route(peer: Peer, path: str) -> str:
    return f"{peer.name} at {peer.url}{path}"


def _not_theirs(peer: Peer, path: str, logprobs: int, tokens: int) -> PeerError:
    return PeerError(field=_route(peer, path), got=f"{logprobs} logprobs", wanted=f"those of {tokens} sampled tokens")


async def _ask(peer: Peer, path: str) -> dict[str, Any]:
    """Return the JSON object of a route, or an empty one if the route does not exist."""
    try:
        response = await peer.request("GET", path)
    except PeerRefused as refusal:
        if refusal.status in (401, 403):
            raise
        return {}
    try:
        answer = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}
