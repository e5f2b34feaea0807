"""The rollout API's wire contract: every request and answer, in JSON and in MessagePack.

Environments post scored groups, the trainer leases batches of them. Each structure is one body of the protocol in
`docs/rollout_api.md`. Only the standard library and msgspec are imported, so a client of the API needs neither torch
nor a web framework.

A *group* (`ScoredData`) is several answers to one prompt. JSON carries it as lists, MessagePack packed:

    tokens, masks              int32, little-endian, all sequences one after another
    advantages, *_logprobs     float32 where that loses nothing, else float64 (their length says which)
    lengths                    tokens in each sequence

`encode_group`, `decode_group` and `decode_batch` are for clients; the bytes of a `PackedGroup` may also be read
without a copy (`torch.frombuffer`, `numpy.frombuffer`).
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from grpo_common.http import is_msgpack

FORMAT = 1
"""Number of the format of all messages; the answers to /register and /register-env have it if it is above 1."""
STORE_FORMAT = 2
"""Number of the format of the queue on disk (`environments.api.store`), whose tables hold some of these messages."""
JSON = "application/json"
MSGPACK = "application/msgpack"

IGNORED = -100
"""A mask entry of this value says that the token is not trained; any other says that it is."""
TRUNCATED = "truncated"
"""Key of `overrides`: true for a sequence that reached a limit of its tokens."""
UNSCORED = "unscored"
"""Key of `overrides`: true for a sequence to which no reward applies. Its score is not used."""
BRANCHES = "branches"
"""Key of `overrides`: lengths of the sequences that one after another make a sequence of the group, such as those of an
agent's episode. They have one reward and are compared with others as one; each is trained in its own context."""
MASKED_LOGPROB = 1.0
"""What environments put in `inference_logprobs` where no token was sampled (a logprob is never positive)."""

# Whole numbers stay within 2**53: the same number in JSON, JavaScript, SQLite and MessagePack.
_Int = Annotated[int, Meta(ge=-(2**53), le=2**53)]
_Count = Annotated[int, Meta(ge=1, le=2**31)]
_Batch = Annotated[int, Meta(ge=1, le=2**17)]  # sequences: with reservations and odd sizes the choice takes seconds
Id = Annotated[int, Meta(ge=0, le=2**53)]
_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Name = Annotated[str, Meta(max_length=1024)]
_Process = Annotated[str, Meta(max_length=4096)]  # as long as a path may be
_Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.1, le=24 * 3600.0)]
_Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]  # JSON has no NaN and no infinity, MessagePack has
_Weight = Annotated[float, Meta(ge=0.0, le=1e100)]
Wait = Annotated[float, Meta(ge=0.0, le=60.0)]

LeaseEnd: TypeAlias = Literal["acknowledged", "expired", "released", "taken over"]
"""How the lease of a batch ended; "expired": it ran out, and its groups returned to the queue."""

T = TypeVar("T")

# The run and its environments


class Register(Struct, frozen=True, kw_only=True):
    """POST /register: a trainer announces itself, or takes the run over from one that has gone.

    `batch_size` counts sequences. With the `uuid` of an earlier answer the trainer keeps that identity. Environments
    are asked to evaluate every `eval_every` steps, and start no group that could lag more than `max_staleness` versions
    when it is trained on.
    """

    wandb_group: _Name
    wandb_project: _Name
    batch_size: _Batch
    max_token_len: _Int
    checkpoint_dir: _Name
    save_checkpoint_interval: _Int
    starting_step: Id
    num_steps: _Int
    uuid: Id | None = None
    eval_every: _Count | None = None
    max_staleness: Id | None = None


class RegisterResponse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to POST /register."""

    uuid: int
    format: int = 1


class RegisterEnv(Struct, frozen=True, kw_only=True):
    """POST /register-env: an environment asks for its id, once a second until `status` is `success`.

    `process` is the same for a process that was started again: it takes the place of the one that was killed.
    """

    max_token_length: _Count
    desired_name: _Name | None
    weight: _Weight
    group_size: _Count
    min_batch_allocation: _Fraction | None = None
    process: _Process | None = None


class RegisterEnvResponse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to POST /register-env; only `status` until a trainer has asked for a batch."""

    status: Literal["success", "wait for trainer to start"]
    env_id: int | None = None
    wandb_name: str | None = None
    checkpoint_dir: str | None = None
    starting_step: int | None = None
    checkpoint_interval: int | None = None
    num_steps: int | None = None
    eval_every: int | None = None
    max_staleness: int | None = None
    format: int = 1


class EnvIdentifier(Struct, frozen=True, kw_only=True):
    """POST /disconnect-env, and the body of GET /status-env (which may also be `?env_id=`)."""

    env_id: Id


class DisconnectResponse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to POST /disconnect-env."""

    status: Literal["success", "failure"]
    error: str | None = None


class WandbInfo(Struct, frozen=True, kw_only=True):
    """Answer to GET /wandb_info: nulls until a trainer has registered."""

    group: str | None
    project: str | None


class Info(Struct, frozen=True, kw_only=True):
    """Answer to GET /info: -1 until a trainer has registered."""

    batch_size: int
    max_token_len: int


class StatusEnv(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to GET /status-env. Queue sizes are in groups of the asking environment's size.

    With `?wait=SECONDS` also: `leased`, the groups that the trainer holds and has not trained on; `trainer`, what it
    registered with; and `seen`, which the next request sends back so that it is answered when something has changed.
    """

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float
    leased: int | None = None
    trainer: Register | None = None
    seen: str | None = None


class EnvStatus(Struct, frozen=True, kw_only=True):
    """One environment in `Status`: `reserved` in sequences per batch, `idle_s` since it was heard of, `posted_s` since
    it posted a group. One that `follows` the run waits for news, and leaves when all steps are done."""

    env_id: int
    name: str
    group_size: int
    connected: bool
    alive: bool
    idle_s: float
    weight: float
    reserved: int
    queued_groups: int
    queued_sequences: int
    buffered_sequences: int
    received_groups: int
    posted_s: float = 0.0
    follows: bool = False


class LeaseStatus(Struct, frozen=True, kw_only=True):
    """A batch that a trainer holds and has not acknowledged; below 0 s it should have been extended."""

    batch_id: str
    groups: int
    expires_in_s: float


class Staleness(Struct, frozen=True, kw_only=True):
    """Policy versions of the queued groups; `behind` is the current step less the oldest version."""

    oldest_version: int
    newest_version: int
    behind: int


class Status(Struct, frozen=True, kw_only=True):
    """Answer to GET /status: the step, the queue (in groups), and why a batch does or does not come.

    `unfit_sizes`: sizes of the groups that are queued or will be posted, if no sum of them is a batch.
    """

    current_step: int
    queue_size: int
    registered: bool = False
    started: bool = False
    batch_size: int = -1
    num_steps: int = -1
    queued_sequences: int = 0
    queued_bytes: int = 0
    max_queued_bytes: int = 0
    buffered_groups: int = 0
    leased_groups: int = 0
    batch_ready: bool = False
    waiting_for: str | None = None
    warnings: list[str] = []
    unfit_sizes: list[int] = []
    groups_by_size: dict[str, int] = {}
    environments: list[EnvStatus] = []
    leases: list[LeaseStatus] = []
    staleness: Staleness | None = None
    durable: bool = False


# Groups


class _Carried(Struct, frozen=True, kw_only=True):
    """What both forms of a group carry alike; an empty list or dictionary means absent.

    `policy_versions` (optional): the policy version that sampled each sequence.
    `routed_experts` (optional; base64 in JSON): for each sequence the experts of its tokens, as
    `vllm_server.protocol.routed_experts` says; empty for a sequence without.
    """

    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    distill_token_ids: list[list[list[_Int32]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
    policy_versions: list[_Int] | None = None
    routed_experts: list[bytes] | None = None


class ScoredData(_Carried, frozen=True, kw_only=True):
    """POST /scored_data: one group of `n` sequences.

    `tokens[i]`, `masks[i]`, `advantages[i]`, `ref_logprobs[i]` and `inference_logprobs[i]` are equally long;
    there is one score per sequence.
    """

    tokens: list[list[_Int32]]
    masks: list[list[_Int32]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None
    env_id: Id | None = None


class PackedGroup(_Carried, frozen=True, kw_only=True, omit_defaults=True):
    """A group as MessagePack carries it and as the server keeps it; the module's head gives the formats."""

    lengths: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]
    tokens: bytes
    masks: bytes
    scores: list[float]
    advantages: bytes | None = None
    ref_logprobs: bytes | None = None
    inference_logprobs: bytes | None = None
    env_id: Id | None = None


class ScoredDataResponse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to POST /scored_data; `buffer_size` (sequences) wait to sum to the environment's group size."""

    status: Literal["received", "buffered"]
    buffer_size: int | None = None


class RejectedGroup(Struct, frozen=True, kw_only=True):
    """A group of a list that was refused: its place in the list, the field, and what is wrong with it."""

    group: int
    field: str
    detail: str


class ScoredDataListResponse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to POST /scored_data_list. With `rejected` its status is 422, and the others were received.

    `rejected` names 100 groups at most; `more_rejected` counts the others that were refused.
    """

    status: Literal["received", "partial"]
    groups_processed: int
    buffered: int | None = None
    last_buffer_size: int | None = None
    rejected: list[RejectedGroup] | None = None
    more_rejected: int | None = None


# Batches


class _Served(Struct, frozen=True, kw_only=True):
    """What both forms of a batch carry alike."""

    batch_id: str | None = None
    expires_in_s: float | None = None
    current_step: int | None = None
    status: str | None = None
    message: str | None = None


class Batch(_Served, frozen=True, kw_only=True):
    """Answer to GET /batch, in whole groups, oldest first, exactly `batch_size` sequences.

    `batch` is None while no batch can be made. With `?lease=SECONDS` it bears a `batch_id`: acknowledge it
    (POST /batch/{batch_id}/ack) or extend it within `expires_in_s`. Otherwise, unless the batch was asked for with a
    trainer's `uuid`, the groups return to the front of the queue.
    Before POST /register `status` is `error` and `message` says why.
    """

    batch: list[ScoredData] | None


class PackedBatch(_Served, frozen=True, kw_only=True, omit_defaults=True):
    """`Batch` as MessagePack carries it."""

    batch: list[PackedGroup] | None


class Ack(Struct, frozen=True, kw_only=True):
    """POST /batch/{batch_id}/ack: trained. `step` is the step now reached; absent, it goes up by one."""

    step: Id | None = None


class LeaseResponse(Struct, frozen=True, kw_only=True):
    """Answer to acknowledging, extending or releasing a batch."""

    status: Literal["acknowledged", "extended", "released"]
    current_step: int


# Evaluation and errors


class Evaluation(Struct, frozen=True, kw_only=True):
    """POST /evaluation: an environment's figures on held-out prompts, of the policy as it was from `step` on."""

    env_id: Id
    step: Id
    metrics: dict[_Name, _Finite]


class EvaluationResponse(Struct, frozen=True, kw_only=True):
    """Answer to POST /evaluation."""

    status: Literal["received"] = "received"


class NumberedEvaluation(Struct, frozen=True, kw_only=True):
    """An evaluation with its number, which is above those of all that came before, and its environment's name."""

    number: int
    name: str
    step: int
    metrics: dict[str, float]


class Evaluations(Struct, frozen=True, kw_only=True):
    """Answer to GET /evaluations: the newest that came after number `after`, oldest first."""

    evaluations: list[NumberedEvaluation]


class ErrorResponse(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Any 4xx: what is wrong, and where it can be named, the field; of a batch that is refused, how its lease ended."""

    detail: str
    field: str | None = None
    reason: LeaseEnd | None = None


# Packing: rows of numbers as little-endian bytes (the order of every machine that runs a model server)

_CARRIED = _Carried.__struct_fields__
PER_TOKEN: Mapping[str, Literal["i", "f"]] = {
    "tokens": "i",
    "masks": "i",
    "advantages": "f",
    "ref_logprobs": "f",
    "inference_logprobs": "f",
}
"""Fields with a number for each token, and the letter by which `array` and `memoryview` name its type."""


def pack(group: ScoredData) -> PackedGroup:
    """Return the group packed; its rows must be as long as its tokens (`environments.api.groups` checks it)."""
    return PackedGroup(
        lengths=[len(row) for row in group.tokens],
        tokens=_ints(group.tokens),
        masks=_ints(group.masks),
        scores=group.scores,
        advantages=_floats(group.advantages or ()),
        ref_logprobs=_floats(group.ref_logprobs or ()),
        inference_logprobs=_floats(group.inference_logprobs or ()),
        **{name: getattr(group, name) or None for name in _CARRIED},
        env_id=group.env_id,
    )


def unpack(group: PackedGroup) -> ScoredData:
    """Return the group as lists, exactly as they were given to `pack`."""
    numbers = {name: getattr(group, name) for name in PER_TOKEN}
    return ScoredData(
        scores=group.scores,
        **{
            name: None if data is None else list(rows(data, PER_TOKEN[name], group.lengths))
            for name, data in numbers.items()
        },
        **{name: getattr(group, name) for name in _CARRIED},
        env_id=group.env_id,
    )


def rows(data: bytes, kind: Literal["i", "f"], lengths: Sequence[int]) -> Iterator[list[Any]]:
    """Yield each sequence's numbers; `kind` is one of `PER_TOKEN`."""
    numbers = memoryview(data).cast("d" if len(data) == 8 * sum(lengths) else kind)
    for start, end in pairwise([0, *accumulate(lengths)]):
        yield numbers[start:end].tolist()


def _ints(rows: Iterable[list[int]]) -> bytes:
    numbers = array("i")
    for row in rows:
        numbers.fromlist(row)
    return numbers.tobytes()


def _floats(rows: Iterable[list[float]]) -> bytes | None:
    numbers = array("f")
    for row in rows:
        packed = array(numbers.typecode, row)
        # Logprobs come from float32 models: most rows lose nothing at half the size.
        if numbers.typecode == "f" and packed.tolist() != row:
            numbers, packed = array("d", numbers), array("d", row)
        numbers += packed
    return numbers.tobytes() or None


def counted_scores(group: ScoredData | PackedGroup) -> list[float]:
    """Return the scores of a group without those of sequences that are marked as unscored."""
    marks = [{**(group.group_overrides or {}), **own}.get(UNSCORED) for own in group.overrides or ()]
    return [score for score, mark in zip(group.scores, marks, strict=True) if not mark] if marks else group.scores


def branch_lengths(overrides: Mapping[str, Any], tokens: int) -> list[int]:
    """Return the lengths of the sequences that make one of a group, which has `tokens` in all.

    Raises:
        ValueError: `BRANCHES` are no lengths above 0 that sum to `tokens`.
    """
    lengths = overrides.get(BRANCHES)
    if lengths is None:
        return [tokens]
    if not (isinstance(lengths, list) and all(type(n) is int and n > 0 for n in lengths) and sum(lengths) == tokens):
        raise ValueError(f"{lengths!r:.100}, expected lengths above 0 that sum to {tokens}")
    return lengths


# Bodies


def encode(message: Any, content_type: str = JSON) -> bytes:
    """Return a message of this module as bytes."""
    return msgspec.msgpack.encode(message) if is_msgpack(content_type) else msgspec.json.encode(message)


def decode(body: bytes, message_type: type[T], content_type: str = JSON) -> T:
    """Return bytes as a message of this module. Raise msgspec.DecodeError; if it has another shape, ValidationError."""
    if is_msgpack(content_type):
        return msgspec.msgpack.decode(body, type=message_type)
    return msgspec.json.decode(body, type=message_type)


def encode_group(group: ScoredData, content_type: str = MSGPACK) -> bytes:
    """Return the body of POST /scored_data; send it with `Content-Type: content_type`."""
    return encode(pack(group) if is_msgpack(content_type) else group, content_type)


def decode_group(body: bytes, content_type: str = MSGPACK) -> ScoredData:
    """The inverse of `encode_group`."""
    if is_msgpack(content_type):
        return unpack(decode(body, PackedGroup, content_type))
    return decode(body, ScoredData, content_type)


def decode_batch(body: bytes, content_type: str = MSGPACK) -> Batch:
    """Return the answer to GET /batch, by its own `Content-Type`; ask with `Accept: application/msgpack`."""
    if not is_msgpack(content_type):
        return decode(body, Batch, content_type)
    fields = msgspec.structs.asdict(decode(body, PackedBatch, content_type))
    groups = fields.pop("batch")
    return Batch(batch=None if groups is None else [unpack(group) for group in groups], **fields)
