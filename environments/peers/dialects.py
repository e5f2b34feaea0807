"""The inference servers that environments can ask, and how each is asked for token ids with their logprobs.

| dialect | route | ids and logprobs from |
|---|---|---|
| grpo's own server | `/generate` | `token_ids`, `logprobs` |
| vLLM as it comes, OpenAI-compatible | `/v1/completions` | `token_ids` (`return_token_ids`), `token_logprobs` |
| SGLang | `/generate` | `meta_info.output_token_logprobs` |

Text is never tokenised again. A server that gives no ids can be evaluated, not trained from.

Sources: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html,
https://docs.sglang.ai/basic_usage/native_api.html.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from environments.peers.http import Peer, PeerError, PeerRefused
from vllm_server.protocol import GENERATE_ROUTE, GenerateRequest, GenerateResponse, TokenPrompt

log = logging.getLogger(__name__)

COMPLETIONS_ROUTE = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. The defaults are the plain distribution of the policy, which GRPO's ratios assume.

    Nucleus and top-k sampling are switched off in so many words: servers take a model's own defaults otherwise,
    and the logprobs would then be of another distribution than the one sampled from.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def to_body(self) -> dict[str, Any]:
        """The sampling keys of vLLM's bodies."""
        body: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        stops = {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)}
        return body | {key: value for key, value in stops.items() if value}


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    Attributes:
        prompt_token_ids: The prompt as the server read it.
        token_ids: What was sampled, the token that ended it included; empty where the server tells no ids.
        rollout_logprobs: Logprob of each sampled token under the policy that sampled it.
        text: The server's rendering, without special tokens; may be empty where it tells ids.
        finish_reason: ``stop`` or ``length``, as vLLM says it.
        policy_version: Version of the policy that sampled; None where the server counts none.
        temperature: At which it was sampled, and at which the logprobs are.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    rollout_logprobs: list[float]
    text: str
    finish_reason: str
    policy_version: int | None
    temperature: float = 1.0


class Dialect(Protocol):
    """How one kind of server is asked."""

    async def generate(self, peer: Peer, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """`n` completions of one prompt; errors as `Peer.request`, and PeerError for an answer that is not sound."""
        ...


@dataclass(frozen=True, slots=True)
class GrpoServer:
    """`grpo serve`: says which version of the policy answered. `model` None: the newest."""

    model: str | None

    async def generate(self, peer: Peer, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """By `POST /generate`. Text is asked for only if `stop` strings need it: it is half of a token's CPU time."""
        wanted = {"n": n, "logprobs": 0, "detokenize": bool(sampling.stop), **sampling.to_body()}
        request = GenerateRequest(prompt=TokenPrompt(prompt_token_ids), model=self.model, sampling=wanted)
        response = await peer.request("POST", GENERATE_ROUTE, json=request.to_body())
        try:
            answer = msgspec.json.decode(response.content, type=GenerateResponse)
        except msgspec.DecodeError as error:
            raise PeerError(
                field=_route(peer, GENERATE_ROUTE),
                got=error,
                wanted="the answer of grpo's server",
                fix="start it with `grpo serve`, or let --openai.server_type auto find out what it is",
            ) from None
        if answer.logprobs is None or not len(answer.token_ids) == len(answer.logprobs) == n:
            got = "no logprobs" if answer.logprobs is None else f"{len(answer.token_ids)} completions"
            raise PeerError(field=_route(peer, GENERATE_ROUTE), got=got, wanted=f"logprobs of {n} completions")
        rows = zip(answer.token_ids, answer.logprobs, answer.text, answer.finish_reasons, strict=True)
        return [
            Completion(
                prompt_token_ids=answer.prompt_token_ids,
                token_ids=token_ids,
                rollout_logprobs=_sampled_logprobs(peer, token_ids, positions),
                text=text,
                finish_reason=finish_reason or "unknown",
                policy_version=answer.policy_version,
                temperature=sampling.temperature,
            )
            for token_ids, positions, text, finish_reason in rows
        ]

    async def prompt_logprobs(self, peer: Peer, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        """The likeliest tokens at each place of a sequence."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
        request = GenerateRequest(prompt=TokenPrompt(token_ids), model=self.model, sampling=sampling)
        response = await peer.request("POST", GENERATE_ROUTE, json=request.to_body())
        return msgspec.json.decode(response.content, type=GenerateResponse).prompt_logprobs or []


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
    """vLLM as it comes, or another server with OpenAI's routes, asked for ids by vLLM's `return_token_ids`."""

    model: str

    async def generate(self, peer: Peer, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """By `POST /v1/completions`, the prompt as ids."""
        body = {"model": self.model, "prompt": prompt_token_ids, "n": n, "logprobs": 0, "return_token_ids": True}
        response = await peer.request("POST", COMPLETIONS_ROUTE, json=body | sampling.to_body())
        try:
            choices = msgspec.json.decode(response.content, type=_Completions).choices
        except msgspec.DecodeError as error:
            raise PeerError(field=_route(peer, COMPLETIONS_ROUTE), got=error, wanted="OpenAI's completions") from None
        if len(choices) != n:
            raise _wrong_number(peer, COMPLETIONS_ROUTE, len(choices), n)
        version = response.headers.get("x-policy-version")
        return [
            Completion(
                prompt_token_ids=choice.prompt_token_ids or prompt_token_ids,
                token_ids=choice.token_ids or [],
                rollout_logprobs=_choice_logprobs(peer, choice),
                text=choice.text,
                finish_reason=choice.finish_reason or "unknown",
                policy_version=int(version) if version else None,
                temperature=sampling.temperature,
            )
            for choice in choices
        ]

    async def prompt_logprobs(self, peer: Peer, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        """The likeliest tokens at each place of a sequence, by vLLM's `prompt_logprobs`."""
        body = {"model": self.model, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": top_k}
        response = await peer.request("POST", COMPLETIONS_ROUTE, json=body)
        (choice,) = msgspec.json.decode(response.content, type=_Completions).choices
        return [
            None if position is None else {token: entry.logprob for token, entry in position.items()}
            for position in choice.prompt_logprobs or []
        ]


def _choice_logprobs(peer: Peer, choice: _Choice) -> list[float]:
    if not choice.token_ids:
        return []
    found = choice.logprobs.token_logprobs if choice.logprobs else None
    logprobs = [value for value in found or [] if value is not None]
    if len(logprobs) != len(choice.token_ids):
        raise _not_theirs(peer, COMPLETIONS_ROUTE, len(logprobs), len(choice.token_ids))
    return logprobs


class _FinishReason(msgspec.Struct, frozen=True):
    type: str


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    weight_version: str | None = None


class _SglangAnswer(msgspec.Struct, frozen=True):
    text: str
    meta_info: _Meta


@dataclass(frozen=True, slots=True)
class SglangServer:
    """SGLang by its own route; a whole number as its `weight_version` is taken for the policy's version."""

    async def generate(self, peer: Peer, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """By `POST /generate` of SGLang."""
        params = sampling.to_body() | {"n": n, "skip_special_tokens": False}
        params["max_new_tokens"] = params.pop("max_tokens")
        body = {"input_ids": prompt_token_ids, "sampling_params": params, "return_logprob": True}
        response = await peer.request("POST", GENERATE_ROUTE, json=body)
        try:
            decoded = msgspec.json.decode(response.content, type=_SglangAnswer | list[_SglangAnswer])
        except msgspec.DecodeError as error:
            raise PeerError(field=_route(peer, GENERATE_ROUTE), got=error, wanted="SGLang's answer") from None
        answers = decoded if isinstance(decoded, list) else [decoded]
        if len(answers) != n:
            raise _wrong_number(peer, GENERATE_ROUTE, len(answers), n)
        return [_of_sglang(peer, answer, prompt_token_ids, sampling.temperature) for answer in answers]


def _of_sglang(peer: Peer, answer: _SglangAnswer, prompt_token_ids: list[int], temperature: float) -> Completion:
    meta = answer.meta_info
    if meta.output_token_logprobs is None or any(logprob is None for logprob, *_ in meta.output_token_logprobs):
        wanted = "output_token_logprobs for each sampled token"
        raise PeerError(field=_route(peer, GENERATE_ROUTE), got="none for some", wanted=wanted)
    version = meta.weight_version
    return Completion(
        prompt_token_ids=prompt_token_ids,
        token_ids=[token_id for _, token_id, _ in meta.output_token_logprobs],
        rollout_logprobs=[float(logprob or 0.0) for logprob, _, _ in meta.output_token_logprobs],
        text=answer.text,
        finish_reason=meta.finish_reason.type if meta.finish_reason else "unknown",
        policy_version=int(version) if version and version.isdecimal() else None,
        temperature=temperature,
    )


@dataclass(frozen=True, slots=True)
class Found:
    """What a server turned out to be.

    Attributes:
        dialect: How it is asked.
        description: What it said of itself, for people.
        raw_logprobs: Its logprobs are the model's own, at temperature 1, whatever temperature it sampled at.
    """

    dialect: Dialect
    description: str
    raw_logprobs: bool = False


async def find_dialect(peer: Peer, model: str | None) -> Found:
    """Asks a server what it is; waits for one that is not there yet.

    Raises:
        PeerGone: It was away for longer than the patience.
        PeerRefused: It wants another key.
        PeerError: It is no inference server that is known here.
    """
    if "boot_id" in (info := await _ask(peer, "/bridge/info")):
        return Found(GrpoServer(model), f"grpo's own server, policy version {info.get('policy_version')}")
    for path in ("/model_info", "/get_model_info"):
        if "model_path" in (info := await _ask(peer, path)):
            return Found(SglangServer(), f"SGLang with {info['model_path']}")
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
        wanted="one at /bridge/info (grpo's server), /model_info (SGLang) or /v1/models (vLLM, OpenAI-compatible)",
        fix="check the port",
    )


def _route(peer: Peer, path: str) -> str:
    return f"{peer.name} at {peer.url}{path}"


def _wrong_number(peer: Peer, path: str, got: int, wanted: int) -> PeerError:
    return PeerError(field=_route(peer, path), got=f"{got} completions", wanted=f"{wanted}")


def _not_theirs(peer: Peer, path: str, logprobs: int, tokens: int) -> PeerError:
    return PeerError(field=_route(peer, path), got=f"{logprobs} logprobs", wanted=f"those of {tokens} sampled tokens")


async def _ask(peer: Peer, path: str) -> dict[str, Any]:
    """A JSON object from a route that may not be there."""
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
