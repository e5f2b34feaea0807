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
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

from pydantic import Field, model_validator

from environments.agent.episode import EpisodeFailed, load_command, load_function, played
from environments.agent.front import Front, Session, episode
from environments.api import wire
from environments.config import ConfigError
from environments.dataset.data import Data
from environments.dataset.env import DatasetConfig, DatasetEnv
from environments.dataset.rewards import Score
from environments.peers.inference import Completion
from environments.scoring import gathered
from environments.trajectory import Trajectory, scored_group, unscored_like


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
        self._play = load_function(config.agent, url) if config.agent else load_command(config.command or "", url)
        self._slots = asyncio.Semaphore(config.max_concurrent_episodes)

    @property
    def compares_answers(self) -> bool:
        """True, unless the agent rewards single calls: a group of one episode teaches nothing."""
        return True

    async def close(self) -> None:
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
        """Return a group of episodes of a task. One that fails is lost alone; if all fail, the last error is raised."""
        metrics: list[tuple[str, float]] = []
        try:
            found = await self._episodes(self._source, item, self.config.group_size, metrics)
        finally:
            for name, value in metrics:
                self.measures.add(name, value)
        began = next((each for each in found if each.tokens), None)
        if began is None:  # nobody asked the policy anything
            return None
        empty = unscored_like(began)
        return scored_group(
            [each if each.tokens else replace(empty, score=each.score, messages=each.messages) for each in found]
        )

    async def _episodes(
        self, data: Data, number: int, count: int, metrics: list[tuple[str, float]], **sampling: Any
    ) -> list[Trajectory]:
        """Run episodes of a task; return each, without a score if it failed; add to the metrics."""
        ended = await gathered(self._episode(data, number, sampling) for _ in range(count))
        errors = [result for _, result in ended if isinstance(result, Exception)]
        for own, result in ended:
            metrics += [("failed", float(isinstance(result, Exception))), ("calls_not_trained", own.not_trained)]
            metrics += [("calls", len(own.calls) + own.not_trained)]
        if len(errors) == count:
            raise errors[-1]
        answers = [Completion([], [], [], result, "stop", None) for _, result in ended if isinstance(result, str)]
        judged: list[Score] = []
        if answers:
            judged, more = await self.scored_within(number, self._scores_of(data, number, answers))
            metrics += more
        found, judgements = [], iter(zip(judged, answers, strict=True))
        for own, result in ended:
            score: Score = result if isinstance(result, float) else None
            if isinstance(result, str):
                score, answer = next(judgements)
                if answer.extra and own.messages:
                    own.messages[-1] = {**own.messages[-1], "extra": answer.extra}
            messages = own.messages if self.config.include_messages else ()
            found.append(episode(own.calls, score, temperature=self.config.temperature, messages=messages))
        return found

    async def _episode(
        self, data: Data, number: int, sampling: dict[str, Any]
    ) -> tuple[Session, float | str | Exception]:
        """Run one episode; return its reward, or with `--reward` the answer to score, or the agent's error."""
        assert self._front is not None, "setup has made it"
        own = self._front.open(**sampling)
        try:
            async with self._slots:
                task = deepcopy(data.rows[number])  # the agent may change it
                result = self._result(await played(self._play, task, own, self.config.episode_timeout), own)
        except ConfigError:
            raise
        except Exception as error:  # of the agent's code
            self.failures.log(self.name, f"task {number}", error)
            result = error
        finally:
            self._front.end(own)
        if own.faults:
            raise next(iter(own.faults.values()))
        return own, result

    def _result(self, returned: Any, own: Session) -> float | str:
        """Return the agent's reward, or with `--reward` its answer; else raise ConfigError or EpisodeFailed."""
        if self._rewards:
            if isinstance(returned, str):
                return returned
            if returned is None:
                return own.messages[-1]["content"] if own.messages else ""
            got, fix = f"{returned!r:.100} from the agent, and --reward", "omit --reward, or return a text"
            raise ConfigError(field="--reward", got=got, wanted="a text, or None", fix=fix)
        if returned is None and any(call.reward is not None for call in own.calls):
            return 0.0
        with suppress(TypeError, ValueError):
            if returned is not None and math.isfinite(reward := float(returned)):
                return reward
        got, fix = f"{returned!r:.100}", "return the reward, or add --reward, which scores a text"
        raise EpisodeFailed(field="the agent's result", got=got, wanted="a finite number", fix=fix)

    async def _examine(self, number: int) -> dict[str, float]:
        """Return the means over episodes of one held-out task."""
        config, metrics = self.config, list[tuple[str, float]]()
        found = await self._episodes(
            self._evaluated, number, config.eval_samples, metrics, temperature=config.eval_temperature
        )
        return self._means([each.score for each in found], metrics)
