"""Sums answered by an older policy: the environment behind the figures of stale samples in docs/training.md.

With `lora_only` the server keeps older versions loaded; this environment asks for the one of `lag` steps ago. Each
batch is generated during the step before, which adds a version. The rows of the table are, with `--seed` and
`--env.seed` 0 to 2 and their `--ratio-against` and `--is-correction`:

    grpo run --config configs/quickstart.toml --model runs/demo-model --lr 1e-3 --run-dir runs/late \\
        --env scripts/benchmarks/stale.py --server.port 9001 --lora-keep-versions 8
"""

from __future__ import annotations

from typing import Any

from environments.arithmetic import ArithmeticConfig, ArithmeticEnv
from environments.config import ServerConfig
from environments.peers.inference import Completion, InferenceClient
from environments.trajectory import Message


class LateConfig(ArithmeticConfig):
    """Which server, and how old its answers are."""

    lag: int = 3
    server_url: str = "http://127.0.0.1:9001"


class Late(ArithmeticEnv):
    """Sums that a policy of `lag` steps ago answers."""

    name = "late"
    env_config_cls = LateConfig
    config: LateConfig

    async def setup(self) -> None:
        """Keep a client for each version."""
        await super().setup()
        self.policies: dict[int, InferenceClient] = {}

    async def complete(self, prompt: str | list[Message], n: int, **changes: Any) -> list[Completion]:
        """Return answers of the older policy."""
        version = max(0, self.curr_step - self.config.lag)
        if version not in self.policies:
            asked = ServerConfig(base_url=self.config.server_url, model_name=f"policy-v{version}", server_type="vllm")
            self.policies[version] = InferenceClient(asked, patience=60.0)
        self.server = self.policies[version]
        return await super().complete(prompt, n, **changes)

    async def close(self) -> None:
        """Close the clients."""
        for client in self.policies.values():
            await client.close()
        await super().close()
