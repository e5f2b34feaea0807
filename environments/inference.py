"""Asks the inference server for completions: token ids, logprobs and policy version as the server has them."""

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from environments.config import ServerConfig
from environments.http import Peer, PeerError
from vllm_server.protocol import GENERATE_ROUTE, GenerateRequest, GenerateResponse, TokenPrompt

ASK_AGAIN_S = 0.5


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

    def to_body(self) -> dict[str, Any]:
        """The sampling keys of a ``/generate`` body."""
        body: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return body | ({"stop": list(self.stop)} if self.stop else {})


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    Attributes:
        prompt_token_ids: The prompt as the server read it.
        token_ids: What was sampled, the token that ended it included.
        rollout_logprobs: Logprob of each sampled token under the policy that sampled it.
        text: The server's rendering, without special tokens.
        finish_reason: ``stop`` or ``length``, as vLLM says it.
        policy_version: Version of the policy that sampled.
        temperature: At which it was sampled, and at which the logprobs are.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    rollout_logprobs: list[float]
    text: str
    finish_reason: str
    policy_version: int
    temperature: float = 1.0


class InferenceClient:
    """Client of the server's ``POST /generate``."""

    def __init__(
        self, config: ServerConfig, *, patience: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """`patience`: seconds that the server may be away. `base_url` may end in ``/v1``, as OpenAI clients have it."""
        self._model = config.model_name
        self._slots = asyncio.Semaphore(config.num_max_requests_at_once)
        self._peer = Peer(
            "the inference server",
            config.base_url.removesuffix("/v1"),
            patience=patience,
            timeout=config.timeout,
            api_key=config.api_key,
            connections=config.num_max_requests_at_once,
            transport=transport,
        )

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """`n` completions of one prompt, all of one policy version.

        Raises:
            PeerGone: The server was away for longer than the patience.
            PeerRefused: The server refused the request.
            PeerError: The answer is not what ``/generate`` answers.
        """
        request = GenerateRequest(
            prompt=TokenPrompt(prompt_token_ids),
            model=self._model,
            sampling={"n": n, "logprobs": 0, **sampling.to_body()},
        )
        async with self._slots:
            answer = await self._answer(request)
            while (
                "abort" in answer.finish_reasons
            ):  # cut short by a server that is being stopped: no sample of a policy
                await asyncio.sleep(ASK_AGAIN_S)
                answer = await self._answer(request)
        return list(_completions(answer, n, sampling.temperature))

    async def _answer(self, request: GenerateRequest) -> GenerateResponse:
        response = await self._peer.request("POST", GENERATE_ROUTE, json=request.to_body())
        try:
            return msgspec.json.decode(response.content, type=GenerateResponse)
        except msgspec.DecodeError as error:
            raise PeerError(
                f"the inference server at {self._peer.url}: /generate answered what grpo's server does not "
                f"({error}); start it with `grpo serve`"
            ) from None

    async def close(self) -> None:
        """Closes the connections."""
        await self._peer.close()


def _completions(answer: GenerateResponse, n: int, temperature: float) -> list[Completion]:
    if answer.logprobs is None or not len(answer.token_ids) == len(answer.logprobs) == n:
        got = "no logprobs" if answer.logprobs is None else f"{len(answer.token_ids)} completions"
        raise PeerError(f"the inference server's /generate: got {got}, wanted logprobs of {n} completions")
    return [
        Completion(
            prompt_token_ids=answer.prompt_token_ids,
            token_ids=token_ids,
            rollout_logprobs=_sampled_logprobs(token_ids, positions),
            text=text,
            finish_reason=finish_reason or "unknown",
            policy_version=answer.policy_version,
            temperature=temperature,
        )
        for token_ids, positions, text, finish_reason in zip(
            answer.token_ids, answer.logprobs, answer.text, answer.finish_reasons, strict=True
        )
    ]


def _sampled_logprobs(token_ids: list[int], positions: list[list[dict[int, float]]]) -> list[float]:
    try:
        return [position[0][token_id] for token_id, position in zip(token_ids, positions, strict=True)]
    except (KeyError, IndexError, ValueError):
        raise PeerError(
            f"the inference server's /generate: {len(positions)} logprobs do not belong to the "
            f"{len(token_ids)} sampled tokens"
        ) from None
