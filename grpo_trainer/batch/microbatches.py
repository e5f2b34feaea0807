"""Turns sequences into the tensors of forward and backward passes. Pure.

There are two layouts. Padded: a row for each sequence, right-padded. It needs no attention mask: attention is causal,
so no trained token attends to padding. Packed: all sequences end to end in one row, without padding; attention gets the
place where each begins (`boundaries`). A prompt that several sequences share may stand in the row once
(`shared_prompts.py`): then shared prompts come first, their completions next, and other sequences last. The inputs of
the loss are flat, one entry per trained token (suffix `_N`), and the same in all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_trainer.batch.shared_prompts import families, plan_shared
from grpo_trainer.losses.surrogates import Segments
from grpo_trainer.rollouts.routed_experts import RoutedExperts
from grpo_trainer.rollouts.types import Teacher

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class TrainingSequence:
    """A sample with its advantages and its weight in the batch's loss."""

    tokens_T: NDArray[np.int64]
    positions: NDArray[np.int64]  # positions of trained tokens, each >= 1: a token is predicted from the one before it
    advantages: NDArray[np.float32]  # one per trained token
    rollout_logprobs: NDArray[np.float32] | None  # one per trained token
    weight: float  # weight of each trained token in the loss of the whole batch, including `share`
    temperature: float
    version: int | None = None  # version of the policy that sampled it, if known
    supervised: bool = False
    teacher: Teacher | None = None  # for its trained tokens, if distillation is on
    share: float = 1.0  # factor of its weight; below 1 if it is stale
    experts: RoutedExperts | None = None  # of its first tokens, to be replayed
    number: int = -1  # of its sample in the whole batch; -1: of none

    @property
    def prompt_len(self) -> int:
        """Number of tokens before the first trained one."""
        return int(self.positions[0])


@dataclass(frozen=True)
class SharedPrompts:
    """Prompts at the front of a packed row, and the completions that read them.

    Attributes:
        prompts: int32 `[F + 1]`, where each prompt begins in the row, and where the last ends; the first begins at 0.
        readers: int32 `[F + 1]`, the same for the completions of each prompt, counted from the end of the last prompt.
        longest_prompt, longest_readers: tokens of the longest prompt, and of the largest set of completions of one.
        first, last: where in the row the first completion begins, and the last ends.
    """

    prompts: Tensor
    readers: Tensor
    longest_prompt: int
    longest_readers: int
    first: int
    last: int


@dataclass(frozen=True)
class Packed:
    """Where the sequences of a packed row lie.

    Attributes:
        boundaries: int32 `[B + 1]`, where each piece begins in the row, and where the last ends. A piece is a sequence,
            a shared prompt, or a completion of one.
        positions_1T: position of each token within its sequence.
        longest: tokens of the longest piece.
        shared: the shared prompts; None: all pieces are whole sequences.
    """

    boundaries: Tensor
    positions_1T: Tensor
    longest: int
    shared: SharedPrompts | None = None

    def to(self, device: torch.device) -> Packed:
        """The same on a device."""
        return _moved(self, partial(_to, device=device))


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward and backward pass. B sequences, T tokens, N trained tokens, K tokens of a teacher.

    Attributes:
        tokens_BT: token ids, right-padded; packed: `[1, T]`.
        packed: where sequences lie in the only row; None: there is a row for each.
        predictors_N: index in `tokens_BT.view(-1)` of the token before each trained one, which predicts it.
        targets_N: ids of the trained tokens.
        rows_N, columns_N: the sequence that a trained token belongs to, and its position there; columns are >= 1.
        advantages_N: advantage of each trained token; 1 if supervised.
        weights_N: weight of each trained token in the loss of the whole batch.
        shares_N: factor of the token's sequence in means without such weights; below 1 if it is stale.
        rollout_logprobs_N: logprob that the server sampled with; 0 where `has_rollout_N` is False.
        temperature_N: temperature of sampling.
        supervised_N: the token is imitated; the policy did not sample it.
        teacher_ids_NK, teacher_logprobs_NK: as in `rollouts.types.Teacher`; K is 0 if no sequence has a teacher.
        versions_B: version of the policy that sampled each sequence; -1: unknown.
        numbers_B: number of each sequence's sample in the whole batch; -1: of none.
        experts_PLK: int16, the experts to use for each of the P entries of `tokens_BT.view(-1)`, in each MoE layer; -1
            where the model chooses; None: it chooses everywhere.
    """

    tokens_BT: Tensor
    packed: Packed | None
    predictors_N: Tensor
    targets_N: Tensor
    rows_N: Tensor
    columns_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    shares_N: Tensor
    rollout_logprobs_N: Tensor
    has_rollout_N: Tensor
    temperature_N: Tensor
    supervised_N: Tensor
    teacher_ids_NK: Tensor
    teacher_logprobs_NK: Tensor
    versions_B: Tensor
    numbers_B: Tensor
    experts_PLK: Tensor | None = None

    def moved(self, move: Move) -> MicroBatch:
        """Return a copy with `move` applied to all tensors, including those of `packed`."""
        return _moved(self, move)

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        return self.moved(partial(_to, device=device))

    @property
    def segments(self) -> Segments:
        """The sequences that the trained tokens belong to."""
        return Segments(self.rows_N, len(self.versions_B))


M = TypeVar("M", MicroBatch, Packed)


def _moved(whole: M, move: Move) -> M:
    """Return a copy with `move` applied to all tensors, also to those of its parts."""
    fields = vars(whole).items()
    tensors = {name: move(value) for name, value in fields if isinstance(value, Tensor)}
    parts = {name: _moved(value, move) for name, value in fields if is_dataclass(value)}  # pyright: ignore
    return replace(whole, **tensors, **parts)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; from pinned memory, the copy to a GPU overlaps with the GPU's work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # returns the tensor itself if it is pinned already
    return tensor.to(device, non_blocking=device.type == "cuda")  # only to a GPU: reads on a CPU would not wait


# ---------------------------------------------------------------- the sequences of each microbatch


def plan(lengths: Sequence[int], *, size: int, max_tokens: int | None, packed: bool) -> list[list[int]]:
    """Return the indices of the sequences of each microbatch.

    Args:
        lengths: lengths of the sequences, in tokens.
        size: sequences of a microbatch if `max_tokens` is None.
        max_tokens: most tokens of a microbatch, including padding; a single sequence may have more.
        packed: microbatches have no padding.
    """
    by_length = sorted(range(len(lengths)), key=lambda index: lengths[index])
    if max_tokens is None:
        return [by_length[start : start + size] for start in range(0, len(by_length), size)]
    longest_first = by_length[::-1]  # largest microbatches first: later ones reuse their memory
    return (_bins if packed else _rows)(lengths, longest_first, max_tokens)


def _rows(lengths: Sequence[int], longest_first: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill microbatches with as many rows as fit, each padded to the length of the first."""
    chosen: list[list[int]] = []
    for index in longest_first:
        if chosen and (len(chosen[-1]) + 1) * lengths[chosen[-1][0]] <= max_tokens:
            chosen[-1].append(index)
        else:
            chosen.append([index])
    return chosen


def _bins(lengths: Sequence[int], longest_first: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill as few bins as first-fit-decreasing needs, evenly if possible, since a small pass leaves the device idle."""
    first_fit: list[list[int]] = []
    loads: list[int] = []
    for index in longest_first:
        place = next((at for at, load in enumerate(loads) if load + lengths[index] <= max_tokens), len(loads))
        if place == len(loads):
            first_fit.append([])
            loads.append(0)
        first_fit[place].append(index)
        loads[place] += lengths[index]
    even: list[list[int]] = [[] for _ in first_fit]
    even_loads = [0] * len(first_fit)
    for index in longest_first:
        place = even_loads.index(min(even_loads))
        even[place].append(index)
        even_loads[place] += lengths[index]
    return even if max(even_loads, default=0) <= max(max_tokens, *loads, 0) else first_fit


# ---------------------------------------------------------------- tensors


def split(
    sequences: Sequence[TrainingSequence],
    size: int,
    *,
    max_tokens: int | None = None,
    packed: bool = False,
    shared: bool = False,
) -> list[MicroBatch]:
    """Return the microbatches that `plan` or `plan_shared` chooses.

    Args:
        shared: in packed rows, a prompt that several sequences share stands once.
    """
    lengths = [len(sequence.tokens_T) for sequence in sequences]
    if packed and shared:
        prompts = [sequence.prompt_len for sequence in sequences]
        chosen = plan_shared(kin_of(sequences), prompts, lengths, size=size, max_tokens=max_tokens)
    else:
        chosen = plan(lengths, size=size, max_tokens=max_tokens, packed=packed)
    return [_microbatch([sequences[index] for index in one], packed, shared) for one in chosen]


def kin_of(sequences: Sequence[TrainingSequence]) -> list[list[int]]:
    """Return the families of sequences with the same prompt."""
    return families([sequence.tokens_T[: sequence.prompt_len] for sequence in sequences])


def idle_microbatch(packed: bool, shared: bool) -> MicroBatch:
    """Return a small microbatch whose gradients are 0, as its tokens' weight is 0.

    No length or number in its layout is 0 or 1, because torch compiles again for these.
    """
    sequence = TrainingSequence(np.zeros(4, np.int64), np.array([2, 3]), np.zeros(2, np.float32), None, 0.0, 1.0)
    return _microbatch([sequence, sequence], packed, shared)


@dataclass(frozen=True)
class _Places:
    """Tokens of a pass, and for each sequence the flat indices of its trained tokens and of the tokens before them.

    Attributes:
        pieces: consecutive tokens of a sequence: its index, the first of them, their flat place, their number.
    """

    tokens_BT: NDArray[np.int64]
    packed: Packed | None
    targets: list[NDArray[np.int64]]
    predictors: list[NDArray[np.int64]]
    pieces: list[tuple[int, int, int, int]]


def _microbatch(sequences: Sequence[TrainingSequence], packed: bool, shared: bool = False) -> MicroBatch:
    counts = [len(sequence.positions) for sequence in sequences]
    roll = [
        np.zeros(count, np.float32) if sequence.rollout_logprobs is None else sequence.rollout_logprobs
        for sequence, count in zip(sequences, counts, strict=True)
    ]
    teacher = _joined_teachers(sequences)
    kin: list[list[int]] = []
    if packed and shared:
        # Without a family, the first sequence counts as one: torch compiles again for a row without shared prompts.
        kin = [family for family in kin_of(sequences) if len(family) > 1] or [[0]]
    places = _sharing(sequences, kin) if kin else _end_to_end(sequences) if packed else _padded(sequences)

    def each(values: Sequence[float | bool | int], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype), counts))

    return MicroBatch(
        tokens_BT=torch.from_numpy(places.tokens_BT),
        packed=places.packed,
        predictors_N=torch.from_numpy(np.concatenate(places.predictors)),
        targets_N=torch.from_numpy(places.tokens_BT.reshape(-1)[np.concatenate(places.targets)]),
        rows_N=each(range(len(sequences)), np.int64),
        columns_N=torch.from_numpy(np.concatenate([sequence.positions for sequence in sequences])),
        advantages_N=torch.from_numpy(np.concatenate([sequence.advantages for sequence in sequences])),
        weights_N=each([sequence.weight for sequence in sequences], np.float32),
        shares_N=each([sequence.share for sequence in sequences], np.float32),
        rollout_logprobs_N=torch.from_numpy(np.concatenate(roll).astype(np.float32)),
        has_rollout_N=each([sequence.rollout_logprobs is not None for sequence in sequences], np.bool_),
        temperature_N=each([sequence.temperature for sequence in sequences], np.float32),
        supervised_N=each([sequence.supervised for sequence in sequences], np.bool_),
        teacher_ids_NK=torch.from_numpy(teacher.ids_TK),
        teacher_logprobs_NK=torch.from_numpy(teacher.logprobs_TK),
        versions_B=torch.tensor([-1 if sequence.version is None else sequence.version for sequence in sequences]),
        numbers_B=torch.tensor([sequence.number for sequence in sequences]),
        experts_PLK=_placed_experts(sequences, places),
    )


def _placed_experts(sequences: Sequence[TrainingSequence], places: _Places) -> Tensor | None:
    """Return the experts at their tokens' places; a shared prompt has those of the first sequence that has it."""
    shape = next((one.experts.shape for one in sequences if one.experts is not None), None)
    if shape is None:
        return None
    experts_PLK = np.full((places.tokens_BT.size, shape.layers, shape.top_k), -1, np.int16)
    for index, first, place, count in places.pieces:
        if (experts := sequences[index].experts) is not None:
            rows = experts.ids_TLK[first : first + count]
            experts_PLK[place : place + len(rows)] = rows
    return torch.from_numpy(experts_PLK)


PAD_ID = 0
"""Any token would do, since no trained token attends to padding."""


def _padded(sequences: Sequence[TrainingSequence]) -> _Places:
    longest = max(len(sequence.tokens_T) for sequence in sequences)
    tokens_BT = np.full((len(sequences), longest), PAD_ID, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        tokens_BT[row, : len(sequence.tokens_T)] = sequence.tokens_T
    targets = [row * longest + sequence.positions for row, sequence in enumerate(sequences)]
    pieces = [(row, 0, row * longest, len(sequence.tokens_T)) for row, sequence in enumerate(sequences)]
    return _Places(tokens_BT, None, targets, [places - 1 for places in targets], pieces)


def _end_to_end(sequences: Sequence[TrainingSequence]) -> _Places:
    lengths = [len(sequence.tokens_T) for sequence in sequences]
    tokens_1T = np.concatenate([sequence.tokens_T for sequence in sequences])[None]
    starts = np.cumsum(lengths) - lengths
    targets = [start + sequence.positions for start, sequence in zip(starts, sequences, strict=True)]
    pieces = [(index, 0, int(start), length) for index, (start, length) in enumerate(zip(starts, lengths, strict=True))]
    return _Places(tokens_1T, layout(lengths), targets, [places - 1 for places in targets], pieces)


def _sharing(sequences: Sequence[TrainingSequence], kin: Sequence[Sequence[int]]) -> _Places:
    """Lay out shared prompts, then their completions, then the other sequences.

    Args:
        kin: families whose prompt stands once; other sequences have their own.
    """
    related = {index for family in kin for index in family}
    alone = [index for index in range(len(sequences)) if index not in related]
    prompts = [sequences[family[0]].prompt_len for family in kin]
    pieces = [sequences[family[0]].tokens_T[:length] for family, length in zip(kin, prompts, strict=True)]
    order = [
        (index, prompt, end)
        for family, prompt, end in zip(kin, prompts, np.cumsum(prompts), strict=True)
        for index in family
    ]
    order += [(index, 0, 0) for index in alone]
    targets: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(sequences)
    predictors = list(targets)
    begins = np.cumsum(prompts) - prompts
    placed = [(family[0], 0, int(begin), n) for family, begin, n in zip(kin, begins, prompts, strict=True)]
    at = sum(prompts)
    for index, skipped, end in order:
        places = sequences[index].positions
        pieces.append(sequences[index].tokens_T[skipped:])
        targets[index] = at + places - skipped
        predictors[index] = np.where(places == skipped, end - 1, targets[index] - 1)
        placed.append((index, skipped, at, len(pieces[-1])))
        at += len(pieces[-1])
    lengths = [[len(sequences[index].tokens_T) for index in own] for own in (*kin, alone)]
    row = sharing_layout(list(zip(prompts, lengths[:-1], strict=True)), lengths[-1])
    return _Places(np.concatenate(pieces)[None], row, targets, predictors, placed)


def sharing_layout(kin: Sequence[tuple[int, Sequence[int]]], alone: Sequence[int]) -> Packed:
    """Return the layout of shared prompts, their completions and the other sequences, end to end.

    Args:
        kin: for each prompt its length, and the lengths of the whole sequences that begin with it.
        alone: lengths of the other sequences.
    """
    prompts = [prompt for prompt, _ in kin]
    followers = [[length - prompt for length in lengths] for prompt, lengths in kin]
    readers = [sum(own) for own in followers]
    pieces = [*prompts, *(length for own in followers for length in own), *alone]
    offsets = [0] * len(kin) + [prompt for prompt, lengths in kin for _ in lengths] + [0] * len(alone)
    shared = SharedPrompts(
        prompts=_boundaries(prompts),
        readers=_boundaries(readers),
        longest_prompt=max(prompts),
        longest_readers=max(readers),
        first=sum(prompts),
        last=sum(prompts) + sum(readers),
    )
    return replace(layout(pieces, offsets), shared=shared)


def layout(lengths: Sequence[int], offsets: Sequence[int] | None = None) -> Packed:
    """Return the layout of pieces of these lengths, end to end.

    Args:
        offsets: position of each piece's first token in its sequence (default: 0).
    """
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    begins = boundaries[:-1] if offsets is None else boundaries[:-1] - np.asarray(offsets)
    positions = np.arange(boundaries[-1]) - np.repeat(begins, lengths)
    return Packed(_boundaries(lengths), torch.from_numpy(positions)[None], max(lengths))


def _boundaries(lengths: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _joined_teachers(sequences: Sequence[TrainingSequence]) -> Teacher:
    """Join the teachers of several sequences into one for all trained tokens, padded to the largest K."""
    width = max((s.teacher.ids_TK.shape[1] for s in sequences if s.teacher is not None), default=0)
    count = sum(len(sequence.positions) for sequence in sequences)
    ids_NK, logprobs_NK = np.zeros((count, width), np.int64), np.full((count, width), -np.inf, np.float32)
    start = 0
    for sequence in sequences:
        rows = slice(start, start := start + len(sequence.positions))
        if sequence.teacher is not None:
            own = sequence.teacher.ids_TK.shape[1]
            ids_NK[rows, :own], logprobs_NK[rows, :own] = sequence.teacher.ids_TK, sequence.teacher.logprobs_TK
    return Teacher(ids_NK, logprobs_NK)
