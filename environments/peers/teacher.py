"""A teacher for distillation: its likeliest tokens in the place of each token that is trained.

The trainer learns from them with `--distill-coef`. The teacher is another model behind another server, with the same
vocabulary; nothing of what it would say is sampled, it only reads what the policy wrote.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from environments.api import wire
from environments.config import BaseEnvConfig, ConfigError, ServerConfig
from environments.peers.inference import InferenceClient

TopK = dict[int, float]
"""Token id to logprob, natural log, at temperature 1."""


class Teacher:
    """Client of the teacher's server."""

    def __init__(self, server: InferenceClient, top_k: int) -> None:
        """Use `of`."""
        self._server = server
        self._top_k = top_k

    @classmethod
    def of(cls, config: BaseEnvConfig) -> Teacher | None:
        """The teacher that the settings name, if they name one."""
        if config.teacher_url is None:
            return None
        server = ServerConfig(
            base_url=config.teacher_url, model_name=config.teacher_model_name, api_key=config.teacher_api_key
        )
        client = InferenceClient(server, patience=config.retry_timeout, name="the teacher's server")
        return cls(client, config.teacher_top_k)

    async def annotate(self, group: wire.ScoredData) -> wire.ScoredData:
        """The group with what the teacher would have put in the place of each trained token.

        A group's own `group_overrides` may say otherwise, as in Atropos: `teacher_top_k`, `skip_teacher_top_k`.

        Raises:
            ConfigError: The teacher's server tells no logprobs of a prompt.
            PeerError: It is gone, or refuses; its sequences must be one token longer than those of the policy.
        """
        overrides: dict[str, Any] = group.group_overrides or {}
        top_k = int(overrides.get("teacher_top_k", self._top_k))
        if overrides.get("skip_teacher_top_k") or top_k < 1 or group.distill_token_ids:
            return group
        rows = zip(group.tokens, group.masks, strict=True)
        read = await asyncio.gather(*(self._read(tokens, mask, top_k) for tokens, mask in rows))
        return msgspec.structs.replace(
            group,
            distill_token_ids=[[[*likeliest] for likeliest in row] for row in read],
            distill_logprobs=[[[*likeliest.values()] for likeliest in row] for row in read],
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._server.close()

    async def _read(self, tokens: list[int], mask: list[int], top_k: int) -> list[TopK]:
        """Position by position, likeliest first; nothing where the policy did not speak."""
        positions = await self._server.prompt_logprobs(tokens, top_k)
        if len(positions) != len(tokens):
            raise ConfigError(
                field="--env.teacher_url",
                got=f"logprobs of {len(positions)} tokens",
                wanted=f"logprobs of {len(tokens)} tokens",
                fix="use grpo serve or vLLM",
            )
        return [
            {} if entry == wire.IGNORED or position is None else _likeliest(position, top_k)
            for entry, position in zip(mask, positions, strict=True)
        ]


def _likeliest(position: TopK, top_k: int) -> TopK:
    """The k likeliest: vLLM adds the token that stood there, likely or not."""
    return dict(sorted(position.items(), key=lambda pair: -pair[1])[:top_k])
