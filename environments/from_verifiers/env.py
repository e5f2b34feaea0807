"""`VerifiersEnv`: run an environment of the `verifiers` library (0.4) as a `BaseEnv`.

This module is imported only where `verifiers` is installed (`environments.from_verifiers.__main__`). The library's
training client renders the turns and parses tool calls. Tokens, masks and logprobs come from its traces, which hold the
server's token ids.

Source: https://github.com/PrimeIntellect-ai/verifiers, `verifiers.v1`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]
from verifiers.v1.types import SamplingConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
    default_harness_id,
    env_config_type,
    load_environment,
    resolve_env_config,
)

from environments.api import wire
from environments.base import BaseEnv
from environments.config import ConfigError
from environments.from_verifiers.config import VerifiersConfig
from environments.from_verifiers.engine import MODEL, Engine
from environments.items import Shuffled, Stream
from environments.peers.inference import Completion
from environments.running.evaluation import examine_each
from environments.trajectory import Message, Trajectory, group_without_failed, oldest_version
from grpo_common.errors import UserError
from vllm_server.protocol.routed_experts import joined

log = logging.getLogger(__name__)

Played = tuple[Any, list[Completion]]
"""A trace of the library, and the completions of its turns."""


class RolloutFailed(UserError, RuntimeError):
    """The environment, its program or its tools failed."""


class VerifiersEnv(BaseEnv[Any, VerifiersConfig]):
    """An environment of the `verifiers` library."""

    name = "verifiers"
    env_config_cls = VerifiersConfig
    engine: Engine | None = None
    _serving: asyncio.Task[None] | None = None

    async def setup(self) -> None:
        """Load the environment; start its servers and the engine for its requests."""
        for chatty in ("aiohttp.access", "verifiers"):
            logging.getLogger(chatty).setLevel(logging.WARNING)
        self.engine = Engine(self.server, self.config.max_token_length, self.more_stops)
        url = await self.engine.start()
        self.environment = load_environment(self._environment_config())
        renderer = {"renderer": {"name": self.config.renderer}} if self.config.renderer else {}
        self.context = vf.ModelContext(
            client=vf.TrainClientConfig(
                base_url=url, api_key_var="", renderer_model_name=self.config.tokenizer_name, **renderer
            ),
            model=MODEL,
            sampling=SamplingConfig(temperature=self.config.temperature, max_tokens=self.config.max_tokens),
        )
        self.items, self.held_out = self._tasks()
        self._episodes = asyncio.Semaphore(self.config.max_concurrent_episodes)
        self._over, serves = asyncio.Event(), asyncio.Event()
        self._serving = asyncio.create_task(self._serve(serves))
        began = asyncio.create_task(serves.wait())
        await asyncio.wait({self._serving, began}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            began.cancel()
            self._serving.result()

    async def close(self) -> None:
        if self._serving is not None:
            self._over.set()
            await asyncio.gather(self._serving, return_exceptions=True)
        if self.engine is not None:
            await self.engine.close()

    async def _serve(self, serves: asyncio.Event) -> None:
        """Hold the resources that rollouts share. Their context managers must be entered and left by one task."""
        async with self.environment.serving():
            serves.set()
            await self._over.wait()

    def _environment_config(self) -> Any:
        """Return the environment's configuration: `env_args`, with our defaults for each agent."""
        environment, _, taskset = self.config.env_id.rpartition("+")
        raw: dict[str, Any] = {"id": environment, **self.config.env_args}
        raw["taskset"] = {"id": taskset, **raw.get("taskset", {})}
        try:
            for name in agent_config_fields(env_config_type(taskset, environment)()):
                raw[name] = {"runtime": {"type": "subprocess"}, **raw.get(name, {})}
                if self.config.max_turns is not None:
                    raw[name].setdefault("max_turns", self.config.max_turns)
                if default_harness_id(taskset) != taskset:
                    raw[name].setdefault("harness", {"id": self.config.harness})
            return resolve_env_config(raw)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                field=f"--env.env_id {self.config.env_id}",
                got=error,
                fix="install its package: grpo env verifiers install PACKAGE",
            ) from None

    def _tasks(self) -> tuple[Iterator[Any], list[Any]]:
        taskset, count = self.environment.taskset, self.config.eval_tasks
        if not taskset.bounded:
            stream = iter(taskset)
            held_out = list(itertools.islice(stream, count))
            return Stream(stream), held_out
        tasks = list(taskset)
        if not tasks:
            field = f"--env.env_id {self.config.env_id}"
            raise ConfigError(field=field, got="a taskset of 0 tasks", wanted="1 or more")
        if len(tasks) <= count:
            log.warning("--env.eval_tasks: there are only %d tasks, so evaluations use training tasks", len(tasks))
            return Shuffled(tasks, self.config.seed), tasks
        return Shuffled(tasks[count:], self.config.seed), tasks[:count]

    async def collect_trajectories(self, item: Any) -> wire.ScoredData | None:
        """Return `group_size` rollouts of a task. One that fails, also when it is retried, is lost alone.

        Raise RolloutFailed if all failed, and errors only after all rollouts have ended: the library's may hang when
        they are cancelled.
        """
        plays = (self._play(item) for _ in range(self.config.group_size))
        played = await asyncio.gather(*plays, return_exceptions=True)
        outcomes: list[Trajectory | Exception] = []
        for each in played:
            if isinstance(each, BaseException) and not isinstance(each, RolloutFailed):
                raise each
            outcomes.append(each if isinstance(each, RolloutFailed) else self._trajectory(*each))
        return group_without_failed(outcomes)

    async def evaluate(self) -> dict[str, float]:
        """Return the mean reward and the environment's own metrics on the evaluation tasks."""
        tasks = [task for task in self.held_out for _ in range(self.config.eval_samples)]
        played, failed = await examine_each(self, tasks, self._play)
        metrics = {"reward": fmean(trace.reward for trace, _ in played), "samples": float(len(played)), **failed}
        names = sorted({name for trace, _ in played for name, value in trace.metrics.items() if value is not None})
        for name in names:
            metrics[name] = fmean(t.metrics[name] for t, _ in played if t.metrics.get(name) is not None)
        return metrics

    async def _play(self, task: Any) -> Played:
        """Return the trained agent's trace of one rollout, and its completions."""
        assert self.engine is not None, "set up"
        trouble: Any = "no turn of the policy"
        for _ in range(1 + self.config.episode_retries):
            async with self._episodes:
                episode = await self.environment.run_episode(task, self.context)
            turns = {trace.id: self.engine.turns.pop(trace.id, []) for trace in episode.traces}
            trace = self._trained(episode)
            if trace is not None:
                self.measures.add("failed", 0.0)
                self.measures.add("turns", trace.num_turns)
                rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
                for name, value in {**trace.metrics, **rewards}.items():
                    if value is not None:
                        self.measures.add(name, value)
                return trace, turns[trace.id]
            errors = [*episode.errors, *(error for each in episode.traces for error in each.errors)]
            trouble = f"{errors[-1].type}: {errors[-1].message}" if errors else trouble
        self.measures.add("failed", 1.0)
        raise RolloutFailed(field=f"a rollout of {self.config.env_id}", got=trouble)

    def _trained(self, episode: Any) -> Any | None:
        """Return the trace to train on: that of the only trainable agent, or of the named one. None: it has no tokens
        of the policy, or no score. A trace that ran out of room has one."""
        wanted = self.config.agent
        traces = [t for t in episode.traces if t.agent.trainable and wanted in (None, t.agent.name)]
        names = sorted({trace.agent.name for trace in traces})
        if len(names) > 1:
            wanted = f"one of {', '.join(names)}, whose turns are trained"
            raise ConfigError("is not set", field="--env.agent", wanted=wanted)
        if not traces or _branch(traces[-1]) is None:
            return None
        trace = traces[-1]
        ran_out_of_room = bool(trace.errors) and "maximum context length" in trace.errors[-1].message
        return trace if trace.ok or trace.is_truncated or ran_out_of_room else None

    def _trajectory(self, trace: Any, turns: Sequence[Completion]) -> Trajectory:
        """Return the branch of the conversation that has most of the policy's tokens."""
        branch = _branch(trace)
        assert branch is not None, "an unsound trace is retried"
        tokens, sampled = list(branch.token_ids), branch.sampled_mask
        experts = [(turn.prompt_token_ids + turn.token_ids, turn.routed_experts) for turn in turns]
        experts.sort(key=lambda turn: len(turn[0]))
        messages: list[Message] = []
        for message in branch.messages if self.config.include_messages else ():
            fields = message.model_dump(exclude_none=True)
            calls = "".join(f"\n[{call['name']} {call['arguments']}]" for call in fields.get("tool_calls", []))
            messages.append({**fields, "content": f"{fields.get('content', '')}{calls}"})
        return Trajectory(
            tokens=tokens,
            trained=sampled,
            rollout_logprobs=[
                logprob if own else wire.MASKED_LOGPROB for logprob, own in zip(branch.logprobs, sampled, strict=True)
            ],
            score=trace.reward,
            policy_version=oldest_version([turn.policy_version for turn in turns]),
            messages=messages,
            temperature=turns[-1].temperature if turns else self.config.temperature,
            cuts={name: value for turn in turns for name, value in turn.cuts.items()},
            routed_experts=joined([rows for ids, rows in experts if tokens[: len(ids)] == ids]),  # of this branch
            truncated=trace.is_truncated,
        )


def _branch(trace: Any) -> Any | None:
    branches = [branch for branch in trace.branches if branch.trainable and any(branch.sampled_mask)]
    return max(branches, key=lambda branch: sum(branch.sampled_mask), default=None)
