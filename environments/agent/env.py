"""`AgentEnv`: train the policy inside an agent. Items are rows of a data set; an agent's episode is its answer.

async def solve(task, client):           # my_agent.py; task is a row, client an openai.AsyncOpenAI
    answer = await client.chat.completions.create(model="policy", messages=[…])
    return 1.0 if "42" in answer.choices[0].message.content else 0.0

grpo run --model M --env agent --agent my_agent.py:solve --data tasks.jsonl
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from typing import Any, Self

from pydantic import Field, model_validator

from environments.agent.calls import episode
from environments.agent.episode import Agent, EpisodeFailed, load_command, load_function
from environments.agent.front import Front, Session
from environments.api import wire
from environments.config import ConfigError
from environments.dataset.data import Data
from environments.dataset.env import DatasetConfig, DatasetEnv
from environments.dataset.rewards import Score
from environments.peers.inference import Completion
from environments.trajectory import scored_group


class AgentConfig(DatasetConfig):
    """Settings of agents, beside the tables ``[data]`` and ``[[rewards]]``."""

    agent: str | None = Field(
        default=None,
        description="the agent, FILE.py:FUNCTION or MODULE:FUNCTION, called as FUNCTION(task, client); --agent is the "
        "same",
    )
    command: str | None = Field(
        default=None,
        description="the agent as a command instead: 'python run.py {task_file}'; OPENAI_BASE_URL and OPENAI_API_KEY "
        "lead to the policy, and its last line is the reward, or with --reward the answer",
    )
    episode_timeout: float = Field(default=600.0, gt=0.0, description="time limit of an episode, in seconds")
    max_concurrent_episodes: int = Field(default=256, ge=1, description="limit of episodes at the same time")

    @model_validator(mode="after")
    def _is_one_agent(self) -> Self:
        if (self.agent is None) == (self.command is None):
            got = "neither" if self.agent is None else "both"
            raise ConfigError(field="--agent, --env.command", got=got, wanted="one of them", fix="name the agent")
        if self.system_prompt is not None or self.teacher_url is not None:
            name = "teacher_url" if self.system_prompt is None else "system_prompt"
            raise ConfigError(field=f"--env.{name}", got="a value", wanted="unset: an agent writes its own prompts")
        return self


class AgentEnv(DatasetEnv):
    """Rows of a data set as tasks of an agent."""

    name = "agent"
    program = "python -m environments.agent"
    env_config_cls = AgentConfig
    config: AgentConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    asks_rows = False
    _front: Front | None = None

    async def setup(self) -> None:
        """Read the tasks, import the rewards and the agent, and serve the policy to it."""
        await super().setup()
        config, sampling = self.config, self.sampling(1).to_body() | {"repetition_penalty": 1.0}
        del sampling["max_tokens"]
        self._front = Front(
            self.server.ask, sampling=sampling, names=frozenset({config.tokenizer_name}),
            longest=config.max_token_length, max_tokens=config.max_tokens, variables=config.chat_template_kwargs,
        )  # fmt: skip
        url = await self._front.start()
        self._play: Agent = (
            load_function(config.agent, url) if config.agent else load_command(config.command or "", url)
        )
        self._slots = asyncio.Semaphore(config.max_concurrent_episodes)

    @property
    def compares_answers(self) -> bool:
        """True, unless the agent rewards single calls: a group of one episode teaches nothing."""
        return True

    async def close(self) -> None:
        """Stop serving the policy."""
        if self._front is not None:
            await self._front.close()
        await super().close()

    async def rehearse(self, item: int, doing: Callable[[str], None]) -> str:
        """Check what can be checked without a server."""
        doing("sampling()")
        self.check_sampling(self.config.max_token_length)
        return f"{self._described}; agent: {self.config.agent or self.config.command}"

    def _asks_in_chat(self) -> bool:
        return False

    def _usable(self, data: Data) -> Sequence[int]:
        return range(len(data.rows))

    async def collect_trajectories(self, item: int) -> wire.ScoredData | None:
        """Return a group of `group_size` episodes of a task. An episode that fails is lost alone.

        Raises:
            Exception: the last error, if all failed.
        """
        sessions, scores = await self._episodes(self._source, item, self.config.group_size)
        for own in sessions:
            self.measures.add("calls", len(own.calls) + own.not_trained)
            self.measures.add("calls_not_trained", own.not_trained)
        found = [
            episode(
                own.calls, score, temperature=self.config.temperature,
                messages=own.messages if self.config.include_messages else (),
            )
            for own, score in zip(sessions, scores, strict=True)
        ]  # fmt: skip
        began = next((each for each in found if each.tokens), None)
        if began is None:  # nobody asked the policy anything
            return None
        first = {"tokens": began.tokens[:1], "trained": [False], "rollout_logprobs": [wire.MASKED_LOGPROB]}
        return scored_group(
            [each if each.tokens else replace(each, **first, policy_version=began.policy_version) for each in found]
        )

    async def _episodes(self, data: Data, number: int, count: int) -> tuple[list[Session], list[Score]]:
        """Run episodes of a task; return what the front recorded, and each one's score; None: it failed."""
        errors: list[Exception] = []
        tasks = [asyncio.create_task(self._episode(data, number, errors)) for _ in range(count)]
        try:
            played = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # the settings or the server are at fault, and the others may still run
                task.cancel()
        if len(errors) == count:
            raise errors[-1]
        sessions, results = [own for own, _ in played], [result for _, result in played]
        if not self._rewards:
            return sessions, [result if isinstance(result, float) else None for result in results]
        answers = [Completion([], [], [], result, "stop", None) for result in results if isinstance(result, str)]
        found, metrics, _ = await self.scoring.within(number, self._scores_of(data, number, answers))
        for name, value in metrics:
            self.measures.add(name, value)
        scores = iter(found)
        return sessions, [None if result is None else next(scores) for result in results]

    async def _episode(self, data: Data, number: int, errors: list[Exception]) -> tuple[Session, float | str | None]:
        """Run one episode; return its reward, or with `--reward` the answer to score; None: it failed."""
        assert self._front is not None, "setup has made it"
        own, limit, result = self._front.open(), asyncio.timeout(self.config.episode_timeout), None
        try:
            async with self._slots, limit:
                result = self._result(await self._play(data.rows[number], own), own)
        except ConfigError:
            raise
        except Exception as error:  # of the agent's code
            if isinstance(error, TimeoutError) and limit.expired():
                seconds = f"{self.config.episode_timeout:g} s"
                error = EpisodeFailed(field="--env.episode_timeout", got=seconds, wanted="the end of the episode")
            self.failures.log(self.name, f"task {number}", error)
            errors.append(error)
        finally:
            self._front.end(own)
        if own.fault is not None:
            raise own.fault
        self.measures.add("failed", result is None)
        return own, result

    def _result(self, returned: Any, own: Session) -> float | str:
        """Return what an agent returned as a reward, or with `--reward` as an answer.

        Raises:
            ConfigError, EpisodeFailed: it is neither.
        """
        if self._rewards and (returned is None or isinstance(returned, str)):
            return returned if returned is not None else own.messages[-1]["content"] if own.messages else ""
        if self._rewards:
            got = f"{returned!r:.100} from the agent, and --reward"
            raise ConfigError(
                field="--reward", got=got, wanted="a text, or None", fix="omit --reward, or return a text"
            )
        if returned is None and any(call.reward is not None for call in own.calls):
            return 0.0
        with suppress(TypeError, ValueError):
            if returned is not None and math.isfinite(reward := float(returned)):
                return reward
        got, fix = f"{returned!r:.100}", "return the reward, or add --reward, which scores a text"
        raise EpisodeFailed(field="the agent's result", got=got, wanted="a finite number", fix=fix)

    async def _examine(self, number: int) -> dict[str, float]:
        """Return the mean reward of episodes of one held-out task."""
        _, scores = await self._episodes(self._evaluated, number, self.config.eval_samples)
        found = [score for score in scores if score is not None]
        return {"reward": fmean(found)} if found else {}
