"""One running server: the engine, the versions in it, and what it says of itself."""

import os
import time
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request

from vllm_server import compat
from vllm_server.policy import PolicyRegistry, Version
from vllm_server.protocol import BridgeInfo, LoraStatus, VersionStatus, WorkerInfo, machine_id
from vllm_server.publisher import Publisher


@dataclass(frozen=True)
class PolicyServer:
    """Held in `app.state.policy_server`; `boot_id` is new for each process."""

    engine: compat.Engine
    adapters: compat.Adapters
    publisher: Publisher
    args: Namespace
    boot_id: str
    workers: tuple[WorkerInfo, ...]

    @classmethod
    async def start(cls, app: Starlette, engine: compat.Engine, args: Namespace) -> "PolicyServer":
        """Made when vLLM has filled `app.state`, before the first request."""
        served = list(args.served_model_name or [args.model])
        lora = engine.vllm_config.lora_config
        registry = PolicyRegistry(
            served_name=served[0],
            aliases=tuple(served[1:]),
            lora_name=args.lora_name,
            keep=args.lora_keep_versions,
            capacity=lora.max_cpu_loras if lora else args.lora_keep_versions + 1,
            base_version=args.policy_version,
        )
        adapters = compat.Adapters(engine, app.state.openai_serving_models)
        publisher = Publisher(
            registry=registry,
            engine=adapters,
            roots=tuple(Path(root).resolve() for root in args.lora_root),
            max_rank=lora.max_lora_rank if lora else None,
        )
        workers = await compat.describe_workers(engine)
        server = cls(engine, adapters, publisher, args, boot_id=str(uuid4()), workers=workers)
        app.state.policy_server = server
        return server

    @classmethod
    def of(cls, request: Request) -> "PolicyServer":
        """The server that a request came to."""
        return request.app.state.policy_server

    @property
    def registry(self) -> PolicyRegistry:
        return self.publisher.registry

    async def generate(
        self, prompt: str | list[int], params: Any, request_id: str, version: Version
    ) -> AsyncGenerator[Any, None]:
        """The engine's outputs for a prompt, answered by `version`; closing it aborts the request."""
        lora = None
        if version is not self.registry.base:
            lora = self.adapters.request(version.name, version.adapter_id, version.path)
        ready = await compat.rendered(self.engine, prompt)
        text = prompt if isinstance(prompt, str) else None
        async with aclosing(
            self.engine.generate(ready, params, request_id, lora_request=lora, prompt_text=text)
        ) as outputs:
            async for output in outputs:
                yield output

    def decode(self, token_ids: list[int]) -> str:
        """The text of a prompt that came as tokens."""
        return self.engine.get_tokenizer().decode(token_ids)

    def lora_status(self) -> LoraStatus:
        """`GET /lora/status`."""
        registry, now = self.registry, time.monotonic()
        newest = registry.newest
        active = newest if newest is not registry.base else None
        return LoraStatus(
            lora_available=self.publisher.max_rank is not None,
            active_adapter_path=active.path if active else None,
            active_adapter_name=active.name if active else None,
            active_adapter_id=active.adapter_id if active else None,
            load_count=registry.load_count,
            available_adapters=[v.name for v in registry.versions if not v.retired],
            policy_version=newest.version,
            versions=[
                VersionStatus(
                    name=v.name,
                    version=v.version,
                    adapter_id=v.adapter_id,
                    adapter_path=v.path,
                    slot=v.slot,
                    in_flight=v.in_flight,
                    served=v.served,
                    age_seconds=now - v.loaded_at,
                    active=v is newest,
                    draining=v.retired,
                )
                for v in registry.versions
            ],
        )

    def bridge_info(self) -> BridgeInfo:
        """`GET /bridge/info`."""
        config = self.engine.vllm_config
        model, lora = config.model_config, config.lora_config
        return BridgeInfo(
            enabled=lora is not None,
            shared_weights=False,
            update_count=self.registry.load_count,
            last_update_time=self.publisher.last_update_time,
            model_name=str(model.model),
            served_model_name=self.registry.base.name,
            device=compat.device_type(),
            dtype=str(model.dtype).removeprefix("torch."),
            boot_id=self.boot_id,
            pid=os.getpid(),
            policy_version=self.registry.newest.version,
            lora_name=self.registry.lora_name,
            max_lora_rank=lora.max_lora_rank if lora else None,
            max_loras=lora.max_loras if lora else 0,
            keep_versions=self.registry.keep,
            max_model_len=model.max_model_len,
            logprobs_mode=str(model.logprobs_mode),
            vllm_version=compat.vllm_version(),
            lora_dtype=str(lora.lora_dtype).removeprefix("torch.") if lora else None,
            machine=machine_id(),
            workers=list(self.workers),
        )
