"""Request completions from an inference server: token ids, logprobs and policy version; and a teacher's logprobs.

| server | route | ids and logprobs from |
|---|---|---|
| grpo's own | `/generate` | `token_ids`, `logprobs` |
| stock vLLM, OpenAI-compatible | `/v1/completions` | `token_ids` (`return_token_ids`), `token_logprobs` |

Text is never tokenised again. A server that returns no ids works for evaluations, but not for training.

Source: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import msgspec

from environments.api import wire
from environments.config import BaseEnvConfig, ConfigError, ServerConfig
from environments.peers.http import Answer, Peer, PeerError, PeerRefused
from grpo_common.formats import check_format
from grpo_common.sampling import cuts
from grpo_common.trace import stage
from vllm_server.protocol import FORMAT, GENERATE_ROUTE, GenerateRequest, GenerateResponse, TokenPrompt

log = logging.getLogger(__name__)

ASK_AGAIN_S = 0.5
ABORTED = b'"finish_reason":"abort"'
COMPLETIONS_ROUTE = "/v1/completions"

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
        always = ("max_tokens", "temperature", "top_p", "top_k")
        body: dict[str, Any] = {name: getattr(self, name) for name in always}
        if self.min_p:  # OpenAI's API does not know it
            body["min_p"] = self.min_p
        stops = {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)}
        return body | {key: value for key, value in stops.items() if value}


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
        routed_experts: Experts of each token of prompt and completion but the last, if the server returns them.
        extra: What its scores say about it, for people to read: `include_messages` shows it with the answer.
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
    extra: dict[str, str] = field(default_factory=dict)


class Inference(Protocol):
    """One inference server, or several; `InferenceClient` documents the methods."""

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]: ...
    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]: ...
    async def ask(self, path: str, body: dict[str, Any]) -> Answer: ...
    async def close(self) -> None: ...


async def _post(peer: Peer, path: str, body: Any, answer_type: type[T], fix: str = "") -> tuple[T, Mapping[str, str]]:
    """Return the answer to a request, and its headers."""
    response = await peer.request("POST", path, json=body)
    try:
        return msgspec.json.decode(response.content, type=answer_type), response.headers
    except msgspec.DecodeError as error:
        raise _unsound(peer, path, error, "the answer of an inference server", fix) from None


def _unsound(peer: Peer, path: str, got: object, wanted: str, fix: str = "") -> PeerError:
    return PeerError(field=f"{peer.name} at {peer.url}{path}", got=got, wanted=wanted, fix=fix)


@dataclass(frozen=True, slots=True)
class GrpoServer:
    """`grpo serve`, which returns policy versions. `model` None: the newest version."""

    model: str | None

    async def generate(self, peer: Peer, prompt: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """Use `POST /generate`. Request text only if `stop` strings need it: text is half of a token's CPU time."""
        keys = {"n": n, "logprobs": 0, "detokenize": bool(sampling.stop), **sampling.to_body()}
        answer = await self._ask(peer, prompt, keys)
        if answer.logprobs is None or not len(answer.token_ids) == len(answer.logprobs) == n:
            got = "no logprobs" if answer.logprobs is None else f"{len(answer.token_ids)} completions"
            raise _unsound(peer, GENERATE_ROUTE, got, f"logprobs of {n} completions")
        try:
            logprobs = [
                [position[0][token] for token, position in zip(token_ids, positions, strict=True)]
                for token_ids, positions in zip(answer.token_ids, answer.logprobs, strict=True)
            ]
        except (KeyError, IndexError, ValueError):
            raise _unsound(peer, GENERATE_ROUTE, "other logprobs", "those of the sampled tokens") from None
        rows = zip(answer.token_ids, logprobs, answer.text, answer.finish_reasons, strict=True)
        return [
            Completion(
                prompt_token_ids=answer.prompt_token_ids,
                token_ids=token_ids,
                rollout_logprobs=rollout_logprobs,
                text=text,
                finish_reason=finish_reason or "unknown",
                policy_version=answer.policy_version,
                temperature=sampling.temperature,
                cuts=cuts(keys),
                routed_experts=answer.routed_experts[place] if answer.routed_experts else None,
            )
            for place, (token_ids, rollout_logprobs, text, finish_reason) in enumerate(rows)
        ]

    async def prompt_logprobs(self, peer: Peer, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        """Use `POST /generate` with `prompt_logprobs`."""
        keys = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
        return (await self._ask(peer, token_ids, keys)).prompt_logprobs or []

    async def _ask(self, peer: Peer, token_ids: list[int], sampling: dict[str, Any]) -> GenerateResponse:
        request = GenerateRequest(prompt=TokenPrompt(token_ids), model=self.model, sampling=sampling)
        fix = "start the server with `grpo serve`, or detect its kind with --openai.server_type auto"
        return (await _post(peer, GENERATE_ROUTE, request.to_body(), GenerateResponse, fix))[0]


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
    raw_logprobs: bool = False
    """Whether its logprobs are the model's own, at temperature 1, whatever the sampling temperature."""

    async def generate(self, peer: Peer, prompt: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """Use `POST /v1/completions`, with the prompt as ids."""
        keys = {"n": n, "logprobs": 0, "return_token_ids": True, **sampling.to_body()}
        choices, version = await self._ask(peer, prompt, keys, n)
        completions = []
        for choice in choices:
            token_ids = choice.token_ids or []
            given = (choice.logprobs.token_logprobs if choice.logprobs else None) or []
            logprobs = [value for value in given if value is not None]
            if token_ids and len(logprobs) != len(token_ids):
                raise _unsound(peer, COMPLETIONS_ROUTE, "other logprobs", "those of the sampled tokens")
            completions.append(
                Completion(
                    prompt_token_ids=choice.prompt_token_ids or prompt,
                    token_ids=token_ids,
                    rollout_logprobs=logprobs if token_ids else [],
                    text=choice.text,
                    finish_reason=choice.finish_reason or "unknown",
                    policy_version=int(version) if version else None,
                    temperature=sampling.temperature,
                    cuts=cuts(keys),
                )
            )
        return completions

    async def prompt_logprobs(self, peer: Peer, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        """Use `POST /v1/completions` with vLLM's `prompt_logprobs`."""
        (choice,), _ = await self._ask(peer, token_ids, {"max_tokens": 1, "prompt_logprobs": top_k}, 1)
        return [
            None if position is None else {token: entry.logprob for token, entry in position.items()}
            for position in choice.prompt_logprobs or []
        ]

    async def _ask(self, peer: Peer, prompt: list[int], keys: dict[str, Any], n: int) -> tuple[list[_Choice], str]:
        """Return the choices, and the policy version that the answer's headers may have."""
        body = {"model": self.model, "prompt": prompt, **keys}
        answer, headers = await _post(peer, COMPLETIONS_ROUTE, body, _Completions)
        if len(answer.choices) != n:
            raise _unsound(peer, COMPLETIONS_ROUTE, f"{len(answer.choices)} completions", f"{n}")
        return answer.choices, headers.get("x-policy-version", "")


Kind = GrpoServer | CompletionsServer
"""The requests for one kind of server; `generate` raises as `Peer.request`, and PeerError for an unsound answer."""


async def detect(peer: Peer, model: str | None) -> Kind:
    """Detect the kind of a server; wait for a server that does not answer yet.

    Raise PeerGone after the patience, PeerRefused if it requires another key, and PeerError if its kind is unknown.
    """
    if "boot_id" in (info := await _get(peer, "/bridge/info")):
        check_format(f"the inference server at {peer.url}", info, FORMAT, PeerError)
        log.info("%s at %s: grpo's own, policy version %s", peer.name, peer.url, info.get("policy_version"))
        return GrpoServer(model)
    version = (await _get(peer, "/version")).get("version")
    models = (await _get(peer, "/v1/models")).get("data")
    if isinstance(models, list) and models and isinstance(models[0], dict):
        served = model or str(models[0].get("id"))
        is_vllm = isinstance(version, str) and models[0].get("owned_by") == "vllm"
        kind = f"vLLM {version}" if is_vllm else "an OpenAI-compatible server"
        log.info("%s at %s: %s with %s", peer.name, peer.url, kind, served)
        return CompletionsServer(served, raw_logprobs=is_vllm)
    raise PeerError(
        field=f"--openai.base_url {peer.url}",
        got="no answer of an inference server",
        wanted="one at /bridge/info (grpo's server) or /v1/models (vLLM, OpenAI-compatible)",
        fix="check the port",
    )


async def _get(peer: Peer, path: str) -> dict[str, Any]:
    """Return the JSON object of a route, or an empty one if the route does not exist."""
    try:
        answer = msgspec.json.decode((await peer.request("GET", path)).content)
    except PeerRefused as refusal:
        if refusal.status in (401, 403):
            raise
        return {}
    except msgspec.DecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


class InferenceClient:
    """Client of one inference server of any kind."""

    def __init__(self, config: ServerConfig, *, patience: float, name: str = "the inference server") -> None:
        """`patience`: seconds that the server may be away. `base_url` may end in ``/v1``, as for OpenAI's clients.

        Raise a ConfigError for `server_type = "openai"` without a model's name.
        """
        self._model = config.model_name
        self._kind: Kind | None = None
        if config.server_type == "vllm":
            self._kind = GrpoServer(config.model_name)
        elif config.server_type == "openai":
            if config.model_name is None:
                raise ConfigError(
                    "required with --openai.server_type openai",
                    field="--openai.model_name",
                    fix="name a model, or use --openai.server_type auto",
                )
            self._kind = CompletionsServer(config.model_name)
        self._detecting: asyncio.Task[Kind] | None = None
        self._slots = asyncio.Semaphore(config.num_max_requests_at_once)
        self._peer = Peer(
            name,
            config.base_url.removesuffix("/v1"),
            patience=patience,
            timeout=config.timeout,
            api_key=config.api_key,
            connections=config.num_max_requests_at_once,
        )

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return `n` completions of one prompt, all of one policy version.

        Raises:
            PeerGone: The server was away for longer than the patience.
            PeerRefused: The server refused the request.
            PeerError: It is not an inference server, or its answer is not sound.
        """
        kind = await self._known_kind(sampling.temperature)
        async with self._slots:
            with stage("generate", completions=n) as span:
                completions = await kind.generate(self._peer, prompt_token_ids, n, sampling)
                # A server that is shutting down aborts completions; these are not samples of the policy.
                while any(completion.finish_reason == "abort" for completion in completions):
                    await asyncio.sleep(ASK_AGAIN_S)
                    completions = await kind.generate(self._peer, prompt_token_ids, n, sampling)
                tokens = sum(len(completion.token_ids) for completion in completions)
                span |= {"version": completions[0].policy_version, "tokens": tokens}
        return completions

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        """Return for each position but the first the `top_k` likeliest tokens and the own one; raise as `generate`."""
        kind = await self._known_kind()
        async with self._slots:
            return await kind.prompt_logprobs(self._peer, token_ids, top_k)

    async def ask(self, path: str, body: dict[str, Any]) -> Answer:
        """Return the answer to a request of OpenAI's API, whose body has no `model`; raise as `generate`."""
        kind = await self._known_kind(body.get("temperature", 1.0))
        body = body if kind.model is None else {**body, "model": kind.model}
        async with self._slots:
            answer = await self._peer.request("POST", path, json=body)
            while ABORTED in answer.content:  # by a server that is shutting down
                await asyncio.sleep(ASK_AGAIN_S)
                answer = await self._peer.request("POST", path, json=body)
        return answer

    async def close(self) -> None:
        if self._detecting is not None:
            self._detecting.cancel()
        await self._peer.close()

    async def detected(self) -> Kind:
        """Return the kind of the server; raise as `detect`. Requests that wait share one detection, and its error."""
        if self._kind is None:
            known = self._detecting
            if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
                known = self._detecting = asyncio.create_task(detect(self._peer, self._model))
            kind = await asyncio.shield(known)  # a request that is given up leaves it to the others
            self._kind = self._kind or kind  # which another one may have changed meanwhile
        return self._kind

    async def _known_kind(self, temperature: float = 1.0) -> Kind:
        """Return the kind; warn once if its logprobs are not those of this temperature."""
        kind = await self.detected()
        if isinstance(kind, CompletionsServer) and kind.raw_logprobs and temperature not in (0.0, 1.0):
            kind = self._kind = replace(kind, raw_logprobs=False)
            log.warning(
                "temperature %g: vLLM gives logprobs at temperature 1 unless it runs with --logprobs-mode "
                "processed_logprobs; the trainer would compare them with its own at %g",
                *(temperature, temperature),
            )
        return kind


TopK = dict[int, float]
"""Maps token id to logprob, natural log, at temperature 1; the likeliest first."""


class Teacher:
    """Client of a teacher's server, for distillation: its likeliest tokens at the position of each trained token.

    The trainer learns from them with `--distill-coef`. The teacher is another model on another server, with the same
    vocabulary. It generates no text: it only computes logprobs of the policy's sequences.
    """

    def __init__(self, server: InferenceClient, top_k: int) -> None:
        self._server = server
        self._top_k = top_k

    @classmethod
    def of(cls, config: BaseEnvConfig) -> Teacher | None:
        """Return the teacher in the settings; None if there is none."""
        if config.teacher_url is None:
            return None
        server = ServerConfig(
            base_url=config.teacher_url, model_name=config.teacher_model_name, api_key=config.teacher_api_key
        )
        client = InferenceClient(server, patience=config.retry_timeout, name="the teacher's server")
        return cls(client, config.teacher_top_k)

    async def annotate(self, group: wire.ScoredData) -> wire.ScoredData:
        """Return the group with the teacher's likeliest tokens at each trained position.

        The group's `group_overrides` may change this, as in Atropos: `teacher_top_k`, `skip_teacher_top_k`. The limit
        of the server's sequences must be one token longer than the policy's. Raise ConfigError if it returns no
        logprobs of a prompt, and PeerError if it is gone, or refuses.
        """
        overrides: dict[str, Any] = group.group_overrides or {}
        top_k = int(overrides.get("teacher_top_k", self._top_k))
        if overrides.get("skip_teacher_top_k") or top_k < 1 or group.distill_token_ids:
            return group
        pairs = zip(group.tokens, group.masks, strict=True)
        rows = await asyncio.gather(*(self._likeliest(tokens, mask, top_k) for tokens, mask in pairs))
        return msgspec.structs.replace(
            group,
            distill_token_ids=[[[*likeliest] for likeliest in row] for row in rows],
            distill_logprobs=[[[*likeliest.values()] for likeliest in row] for row in rows],
        )

    async def close(self) -> None:
        await self._server.close()

    async def _likeliest(self, tokens: list[int], mask: list[int], top_k: int) -> list[TopK]:
        """Return the likeliest tokens by position; none where the policy did not sample."""
        positions = await self._server.prompt_logprobs(tokens, top_k)
        if len(positions) != len(tokens):
            raise ConfigError(
                field="--env.teacher_url",
                got=f"logprobs of {len(positions)} tokens",
                wanted=f"logprobs of {len(tokens)} tokens",
                fix="use grpo serve or vLLM",
            )
        return [
            # vLLM also returns the actual token, likely or not
            dict(sorted(position.items(), key=lambda pair: -pair[1])[:top_k])
            if entry != wire.IGNORED and position is not None
            else {}
            for entry, position in zip(mask, positions, strict=True)
        ]
