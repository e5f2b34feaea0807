"""A teacher for distillation: its likeliest tokens at the position of each trained token.

The trainer learns from them with `--distill-coef`. The teacher is another model on another server, with the same
vocabulary. It generates no text: it only computes logprobs of the policy's sequences.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from environments.api import wire
from environments.config import BaseEnvConfig, ConfigError, ServerConfig
from environments.peers.inference import InferenceClient

TopK = dict[int, float]
"""Maps token id to logprob, natural log, at temperature 1; the likeliest first."""


class Teacher:
    """Client of the teacher's server."""

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

        The group's `group_overrides` may change this, as in Atropos: `teacher_top_k`, `skip_teacher_top_k`.

        Raises:
            ConfigError: The teacher's server returns no logprobs of a prompt.
            PeerError: The server is gone, or refuses; its limit must be one token longer than the policy's sequences.
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
        """Close the connections."""
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
