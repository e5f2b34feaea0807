"""The policy as agents see it, OpenAI's API on this machine; and the sequences that their calls are trained as.

Every episode has a separate key, which opens completions and nothing else until the episode ends. A call goes to an
inference server with the environment's sampling. Token ids, logprobs and policy version of the answer are recorded, and
the agent gets what OpenAI's API answers. Nothing is rendered or tokenised here.

An agent's calls make a tree. A call whose prompt begins with an earlier call's prompt and answer continues that call:
both are one sequence, in which what the agent or its tools wrote is not trained. Any other call begins a sequence, a
branch. So every sampled token is trained once, in the context in which it was sampled.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from environments.api import wire
from environments.peers.http import Answer, PeerError, PeerRefused
from environments.peers.loopback import Loopback
from environments.trajectory import Message, Trajectory, TurnReward, oldest_version
from grpo_common.sampling import WHOLE_VOCABULARY

POLICY: Final = "policy"
CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
BODY_BYTES: Final = 64 * 2**20

PASSED: Final = frozenset(
    {"messages", "prompt", "max_tokens", "max_completion_tokens", "stop", "n", "tools", "tool_choice"}
    | {"parallel_tool_calls", "response_format", "logprobs", "top_logprobs", "chat_template_kwargs"}
)
IGNORED: Final = frozenset(
    {"model", "temperature", "seed", "stream", "stream_options", "user", "metadata", "store", "service_tier"}
    | {"safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity", "reasoning_effort"}
)
"""Taken without effect: the temperature is the environment's, and a seed would make all episodes of a group alike."""
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **{"top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,)},
    **{"repetition_penalty": (1,), "logit_bias": ({},), "best_of": (1,), "echo": (False,), "suffix": ("",)},
}
"""Options that may only have a value that changes nothing."""


TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal", "thinking")
"""Types of a message's parts that the chat template renders as text."""


class Refused(Exception):
    """A call that is not answered. The message is for the agent."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def _refusal(_: Request, refused: Any) -> Response:
    """Return the answer to a refused call, in the form of OpenAI's errors."""
    error = {"message": str(refused), "type": "invalid_request_error", "param": None, "code": refused.code}
    return JSONResponse({"error": error}, status_code=refused.status)


@dataclass(eq=False)
class Session:
    """One episode, as the front knows it."""

    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}", repr=False)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Keys of every body: temperature, stop tokens, the plain distribution."""
    calls: list[Call] = field(default_factory=list)
    """Those that are trained, in the order of their answers."""
    not_trained: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Prompt and answer of the last call, for people to read."""
    faults: dict[int, PeerError] = field(default_factory=dict)
    """Why the server could not answer, for which the agent is not to blame, by the hash of a call's body. An answer to
    a later try removes it."""
    under_way: set[asyncio.Task[Answer]] = field(default_factory=set)

    def reward(self, value: float, answer: Any = None) -> None:
        """Reward one call of the episode, in addition to the reward of its end.

        Args:
            answer: what the call returned; None: the last call.

        Raises:
            ValueError: the episode has no such call that is trained, or the value is not finite.
        """
        if not math.isfinite(value := float(value)):
            raise ValueError(f"reward: got {value}, wanted a finite number")
        found = [call for call in self.calls if answer is None or call.id == answer.id]
        if not found:
            raise ValueError("reward: the episode has no such call that is trained")
        found[-1].reward = (found[-1].reward or 0.0) + value


class Front(Loopback):
    """Serves OpenAI's completions on this machine. `ask` sends a body to a path of an inference server.

    Agents may call the model by `names`, or `policy`. Sequences have up to `longest` tokens, answers up to
    `max_tokens`. `sampling` has the keys of episodes, unless `open` has others. `variables` are of the chat template.
    """

    def __init__(
        self,
        ask: Callable[[str, dict[str, Any]], Coroutine[Any, Any, Answer]],
        *,
        sampling: Mapping[str, Any],
        names: frozenset[str],
        longest: int,
        max_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._ask, self._sampling, self._names = ask, dict(sampling), names | {POLICY}
        self._longest, self._max_tokens, self._variables = longest, max_tokens, dict(variables or {})
        self._sessions: dict[str, Session] = {}
        routes = [
            Route(CHAT, self._answer, methods=["POST"]),
            Route(TEXT, self._answer, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/{path:path}", self._elsewhere, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]
        super().__init__(Starlette(routes=routes, exception_handlers={Refused: _refusal}))

    def open(self, **sampling: Any) -> Session:
        """Begin an episode."""
        session = Session(sampling=self._sampling | sampling)
        self._sessions[session.key] = session
        return session

    def end(self, session: Session) -> None:
        """End an episode: its calls under way are given up, and later ones are refused."""
        self._sessions.pop(session.key, None)
        for task in session.under_way:
            task.cancel()

    def _session(self, request: Request) -> Session:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if (session := self._sessions.get(key)) is None:
            raise Refused(401, "no episode has this key, or it has ended", "invalid_api_key")
        return session

    async def _models(self, request: Request) -> Response:
        self._session(request)
        cards = [{"id": name, "object": "model", "created": 0, "owned_by": "grpo"} for name in sorted(self._names)]
        return JSONResponse({"object": "list", "data": cards})

    async def _elsewhere(self, request: Request) -> Response:
        why = "use chat.completions" if request.url.path == "/v1/responses" else "an agent's key opens completions only"
        raise Refused(404, f"{request.url.path} is not served: {why}", "not_found")

    async def _answer(self, request: Request) -> Response:
        session, path = self._session(request), request.url.path
        content = bytearray()
        async for piece in request.stream():
            content += piece
            if len(content) > BODY_BYTES:
                raise Refused(413, f"a body of more than {BODY_BYTES >> 20} MiB")
        try:
            body = msgspec.json.decode(content, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(400, f"the body is no JSON object: {error}") from None
        asked = self._asked(session, path, body)
        try:
            answer = await self._forwarded(session, path, asked)
            answer = self._recorded(session, body, answer, seen=not await request.is_disconnected())
        except PeerError as error:
            session.faults[hash(bytes(content))] = error
            raise Refused(503, str(error)) from None
        session.faults.pop(hash(bytes(content)), None)
        if not body.get("stream"):
            return JSONResponse(answer)
        options = body.get("stream_options")
        usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return StreamingResponse(chunks(answer, usage=usage), media_type="text/event-stream")

    def _asked(self, session: Session, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body for the server; refuse options that change the trained distribution, or are unknown."""
        if not isinstance(model := body.get("model"), str) or model not in self._names:
            wanted = " or ".join(sorted(self._names))
            raise Refused(404, f"model: got {model!r:.100}, wanted {wanted}", "model_not_found")
        for name, value in body.items():
            if value is None or name in PASSED or name in IGNORED or value in NEUTRAL.get(name, ()):
                continue
            why = f"leave it out: {WHOLE_VOCABULARY}" if name in NEUTRAL else "the policy has no such option"
            raise Refused(400, f"{name:.100}: got {value!r:.100}; {why}", "unsupported_parameter")
        asked = {name: body[name] for name in PASSED if body.get(name) is not None} | dict(session.sampling)
        limits = (asked.pop("max_completion_tokens", None), asked.pop("max_tokens", None), self._max_tokens)
        if given := [each for each in limits if each is not None]:
            if not all(type(each) is int for each in given):
                raise Refused(400, "max_tokens: wanted a whole number")
            asked["max_tokens"] = min(given)
        if path == CHAT:
            messages = body.get("messages")  # of any form: the server refuses the others
            known = [each for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
            for content in (each.get("content") for each in known):
                parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
                if not all(part.get("type") in TEXT_PARTS for part in parts):
                    raise Refused(400, "messages: wanted text: the trainer has no images, sounds or files")
            own = body.get("chat_template_kwargs")
            asked["chat_template_kwargs"] = {**self._variables, **(own if isinstance(own, dict) else {})}
            asked["logprobs"] = True
            for tool in asked["tools"] if isinstance(asked.get("tools"), list) else ():
                if isinstance(tool, dict) and isinstance(function := tool.get("function"), dict):
                    function.pop("strict", None)  # the server would force the form of arguments on the policy
        else:
            asked["logprobs"] = asked.get("logprobs") or 0
        return asked | {"return_token_ids": True}

    async def _forwarded(self, session: Session, path: str, asked: dict[str, Any]) -> Answer:
        """Return the server's answer, or raise Refused: it refuses, or the episode has ended; PeerError: it is away."""
        task = asyncio.create_task(self._ask(path, asked))
        session.under_way.add(task)
        task.add_done_callback(session.under_way.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise Refused(401, "the episode has ended", "invalid_api_key") from None
        except PeerRefused as refusal:
            code = "context_length_exceeded" if "context length" in refusal.got else None
            raise Refused(refusal.status, refusal.got.partition(": ")[2], code) from None

    def _recorded(self, session: Session, body: Mapping[str, Any], answer: Answer, *, seen: bool) -> dict[str, Any]:
        """Record a call; return the answer as the agent gets it, unless it has hung up before it could be `seen`.

        Raise a PeerError if the answer has no token ids and logprobs.
        """
        content: dict[str, Any] = msgspec.json.decode(answer.content, type=dict[str, Any])
        choices: list[dict[str, Any]] = content["choices"]
        prompt_ids, version = content.pop("prompt_token_ids", None), answer.headers.get("x-policy-version")
        for choice in choices:
            own, token_ids = choice.pop("prompt_token_ids", None) or prompt_ids, choice.pop("token_ids", None)
            found = choice.get("logprobs") or {}
            logprobs = found.get("token_logprobs") or [each["logprob"] for each in found.get("content") or []]
            if body.get("logprobs") is None or body["logprobs"] is False:  # 0 is a number of alternatives
                choice["logprobs"] = None
            if own is None or token_ids is None or len(logprobs) != len(token_ids):
                raise PeerError(
                    field="the inference server", got="a completion without its tokens' ids and logprobs",
                    wanted="those of vLLM (return_token_ids)", fix="use grpo serve",
                )  # fmt: skip
            message = choice.get("message") or {"content": choice.get("text")}
            with suppress(TypeError, KeyError, AttributeError):  # some form that the server knows, and we do not
                session.messages = [*map(_shown, body.get("messages") or ()), _shown({**message, "role": "assistant"})]
            form = body.get("response_format")
            is_free = form in (None, {"type": "text"}) and body.get("tool_choice") in (None, "auto", "none")
            if not (seen and is_free and len(choices) == 1 and len(own) + len(token_ids) <= self._longest):
                session.not_trained += 1
            elif token_ids:
                cut, number = choice["finish_reason"] == "length", None if version is None else int(version)
                session.calls.append(Call(content["id"], own, token_ids, logprobs, number, truncated=cut))
        return content


def _shown(message: Any) -> dict[str, Any]:
    """Return a message for people to read, with its tool calls as text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text")) for part in content)
    for call in message.get("tool_calls") or ():
        content += f"\n[{call['function']['name']} {call['function']['arguments']}]"
    return {"role": str(message["role"]), "content": content}


def chunks(answer: Mapping[str, Any], *, usage: bool) -> Iterator[bytes]:
    """Yield an answer as the events of a stream, all at once: a call is recorded when it is complete."""
    is_chat = answer["object"] == "chat.completion"
    same = {key: answer.get(key) for key in ("id", "created", "model")}
    same["object"] = "chat.completion.chunk" if is_chat else "text_completion"

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + msgspec.json.encode({**same, "choices": choices, **more}) + b"\n\n"

    for choice in answer["choices"]:
        if not is_chat:
            yield event([choice])
            continue
        delta = {"role": "assistant", "content": choice["message"].get("content")}
        if calls := choice["message"].get("tool_calls"):
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        part = {"index": choice["index"], "logprobs": choice.get("logprobs")}
        yield event([{**part, "delta": delta, "finish_reason": None}])
        yield event([{**part, "logprobs": None, "delta": {}, "finish_reason": choice["finish_reason"]}])
    if usage:
        yield event([], usage=answer.get("usage"))
    yield b"data: [DONE]\n\n"


@dataclass(slots=True, eq=False)
class Call:
    """One completion of the policy, in the engine's own tokens."""

    id: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    version: int | None
    truncated: bool = False
    reward: float | None = None  # what the agent gave it by `client.reward`


@dataclass(slots=True)
class Branch:
    """A sequence of one or more calls, token by token. `ends` has the place after the answer of each call."""

    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ends: list[tuple[Call, int]] = field(default_factory=list)


def branches(calls: Sequence[Call]) -> list[Branch]:
    """Return the sequences of an episode's calls, which are in the order in which they were answered.

    A call continues the longest sequence with which its prompt begins.
    """
    found: list[Branch] = []
    keys: list[bytes] = []  # tokens of the sequences as bytes, sorted
    of_key: dict[bytes, list[Branch]] = {}
    for call in calls:
        prompt = array("q", call.prompt_ids).tobytes()
        # All keys with which a text begins stand before it. If the nearest one is no such key, then they are
        # beginnings of what both have in common.
        while (at := bisect_right(keys, prompt)) and not prompt.startswith(keys[at - 1]):
            size = min(len(prompt), len(keys[at - 1])) // 8
            same = np.frombuffer(prompt, "q", size) == np.frombuffer(keys[at - 1], "q", size)
            prompt = prompt[: 8 * (size if same.all() else int(same.argmin()))]
        if at:
            branch = of_key[keys.pop(at - 1)].pop()
        else:
            found.append(branch := Branch())
        heard = call.prompt_ids[len(branch.tokens) :]
        branch.tokens = call.prompt_ids + call.token_ids
        branch.trained += [False] * len(heard) + [True] * len(call.token_ids)
        branch.logprobs += [wire.MASKED_LOGPROB] * len(heard) + call.logprobs
        branch.ends.append((call, len(branch.tokens)))
        key = array("q", branch.tokens).tobytes()
        insort(keys, key)
        of_key.setdefault(key, []).append(branch)
    return found


def episode(
    calls: Sequence[Call], score: float | None, *, temperature: float, messages: Sequence[Message] = ()
) -> Trajectory:
    """Return an episode as one unit: its sequences one after another, with the lengths of each.

    The rewards of single calls are added to the `score` of its end; None: no reward applies.
    """
    joined, lengths, rewards = Branch(), list[int](), list[TurnReward]()
    for branch in branches(calls):
        begin = len(joined.tokens)
        rewards += [TurnReward(begin + end, call.reward, begin) for call, end in branch.ends if call.reward is not None]
        joined.tokens += branch.tokens
        joined.trained += branch.trained
        joined.logprobs += branch.logprobs
        lengths.append(len(branch.tokens))
    return Trajectory(
        tokens=joined.tokens,
        trained=joined.trained,
        rollout_logprobs=joined.logprobs,
        score=None if score is None else score + sum(each.value for each in rewards),
        policy_version=oldest_version([call.version for call in calls]),
        messages=[*messages],
        temperature=temperature,
        turn_rewards=tuple(rewards) if score is not None else (),
        truncated=any(call.truncated for call in calls),
        branches=tuple(lengths) if len(lengths) > 1 else (),
    )
