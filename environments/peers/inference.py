"""Request completions from the inference server: token ids, logprobs and policy version."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from environments.config import ConfigError, ServerConfig
from environments.peers.dialects import (
    Completion,
    CompletionsServer,
    Dialect,
    Found,
    GrpoServer,
    Sampling,
    find_dialect,
)
from environments.peers.http import Peer
from environments.threads import elsewhere
from grpo_common.trace import stage

__all__ = ["Completion", "Inference", "InferenceClient", "Sampling"]

log = logging.getLogger(__name__)

ASK_AGAIN_S = 0.5


class Inference(Protocol):
    """One inference server, or several."""

    async def generate(self, prompt_token_ids: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return `n` completions of one prompt, all of one policy version; raise as `InferenceClient`."""
        ...

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        """Return, for each position but the first, the `top_k` likeliest tokens and the actual one."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class InferenceClient:
    """Client of an inference server of any kind (`environments.peers.dialects`)."""

    def __init__(self, config: ServerConfig, *, patience: float, name: str = "the inference server") -> None:
        """`patience`: seconds that the server may be away. `base_url` may end in ``/v1``, as for OpenAI's clients.

        Raises:
            ConfigError: An OpenAI-compatible server needs a model's name.
        """
        self._model = config.model_name
        self._found = _told(config)
        self._finding = asyncio.Lock()
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
        with elsewhere():
            dialect = await self._dialect(sampling)
            async with self._slots:
                with stage("generate", completions=n) as found:
                    completions = await dialect.generate(self._peer, prompt_token_ids, n, sampling)
                    # A server that is shutting down aborts completions; these are not samples of the policy.
                    while any(completion.finish_reason == "abort" for completion in completions):
                        await asyncio.sleep(ASK_AGAIN_S)
                        completions = await dialect.generate(self._peer, prompt_token_ids, n, sampling)
                    tokens = sum(len(completion.token_ids) for completion in completions)
                    found |= {"version": completions[0].policy_version, "tokens": tokens}
        return completions

    async def prompt_logprobs(self, token_ids: list[int], top_k: int) -> list[dict[int, float] | None]:
        """Return, for each position but the first, the `top_k` likeliest tokens and the actual one.

        Raises:
            PeerError: As for `generate`.
        """
        with elsewhere():
            dialect = await self._dialect(Sampling(max_tokens=1))
            async with self._slots:
                return await dialect.prompt_logprobs(self._peer, token_ids, top_k)

    async def close(self) -> None:
        """Close the connections."""
        await self._peer.close()

    async def _dialect(self, sampling: Sampling) -> Dialect:
        async with self._finding:
            if self._found is None:
                self._found = await find_dialect(self._peer, self._model)
                log.info("%s at %s: %s", self._peer.name, self._peer.url, self._found.description)
            if self._found.raw_logprobs and sampling.temperature not in (0.0, 1.0):
                log.warning(
                    "temperature %g: vLLM gives logprobs at temperature 1 unless it runs with --logprobs-mode "
                    "processed_logprobs; the trainer would compare them with its own at %g",
                    sampling.temperature,
                    sampling.temperature,
                )
                self._found = Found(self._found.dialect, self._found.description)  # warned once
        return self._found.dialect


def _told(config: ServerConfig) -> Found | None:
    """Return the kind of server in the settings; None if it must be detected."""
    match config.server_type:
        case "auto":
            return None
        case "vllm":
            return Found(GrpoServer(config.model_name), "grpo's own server")
        case "openai":
            if config.model_name is None:
                raise ConfigError(
                    "required with --openai.server_type openai",
                    field="--openai.model_name",
                    fix="name a model, or use --openai.server_type auto",
                )
            return Found(CompletionsServer(config.model_name), "an OpenAI-compatible server")
