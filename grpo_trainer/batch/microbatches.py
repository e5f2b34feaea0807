"""Turns a batch's samples into the tensors of forward and backward passes. Pure.

There are two layouts. Padded: a row for each sequence, right-padded. It needs no attention mask: attention is causal,
so no trained token attends to padding. Packed: all sequences end to end in one row, without padding; attention gets the
place where each begins (`boundaries`). The inputs of the loss are flat, one entry per trained token (suffix `_N`), and
the same in both layouts.

A prompt that several sequences share may stand in a packed row once: shared prompts come first, their completions next,
and other sequences last. A group of G completions has one prompt. Trained one by one, each of them repeats it: with P
prompt tokens and C tokens of each completion these are G (P + C) tokens, and P + G C with a shared prompt. The result
is the same, because a prompt's hidden states do not depend on later tokens, and its gradient is the sum of those from
all completions (as in Prefix Grouper, arXiv 2506.05433). Attention then has two parts: each piece of the row attends to
itself, and completions also attend to their prompt (`engine/attention.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_trainer.losses import TrainedTokens
from grpo_trainer.rollouts.groups import Sample

Move = Callable[[Tensor], Tensor]

PAD_ID = 0
"""Any token would do, since no trained token attends to padding."""


@dataclass(frozen=True)
class SharedPrompts:
    """Prompts at the front of a packed row, and the completions that read them."""

    prompts: Tensor  # int32 [F + 1], where each prompt begins in the row (the first at 0), and where the last ends
    readers: Tensor  # the same for the completions of each prompt, counted from the end of the last prompt
    longest_prompt: int  # tokens of the longest prompt
    longest_readers: int  # tokens of the largest set of completions of one prompt
    first: int  # where in the row the first completion begins
    last: int  # and where the last ends


@dataclass(frozen=True)
class Packed:
    """Where the pieces of a packed row lie. A piece is a sequence, a shared prompt, or a completion of one."""

    boundaries: Tensor  # int32 [B + 1], where each piece begins in the row, and where the last ends
    positions_1T: Tensor  # position of each token within its sequence
    longest: int  # tokens of the longest piece
    shared: SharedPrompts | None = None  # None: all pieces are whole sequences

    def to(self, device: torch.device) -> Packed:
        return _moved(self, partial(_to, device=device))


@dataclass(frozen=True, kw_only=True)
class MicroBatch(TrainedTokens):
    """Tensors of one forward and backward pass. B sequences, T tokens, N trained tokens, K tokens of a teacher."""

    tokens_BT: Tensor  # token ids, right-padded; packed: [1, T]
    packed: Packed | None  # where sequences lie in the only row; None: there is a row for each
    predictors_N: Tensor  # index in `tokens_BT.view(-1)` of the token before each trained one, which predicts it
    targets_N: Tensor  # ids of the trained tokens
    columns_N: Tensor  # position of each trained token in its sequence, >= 1
    temperature_N: Tensor  # temperature of sampling
    teacher_ids_NK: Tensor  # as in `rollouts.groups.Teacher`
    numbers_B: Tensor  # number of each sequence's sample in the whole batch; -1: of none
    experts_PLK: Tensor | None = None
    """int16, the experts to use for each of the P entries of `tokens_BT.view(-1)`, in each MoE layer; -1 where the
    model chooses; None: it chooses everywhere."""

    def moved(self, move: Move) -> MicroBatch:
        """Return a copy with `move` applied to all tensors, including those of `packed`."""
        return _moved(self, move)

    def to(self, device: torch.device) -> MicroBatch:
        return self.moved(partial(_to, device=device))


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


# ---------------------------------------------------------------- the sequences of each microbatch and process


def plan(
    sequences: Sequence[Sample], *, size: int, max_tokens: int | None, packed: bool = False, shared: bool = False
) -> list[list[int]]:
    """Return the indices of the sequences of each microbatch.

    Args:
        size: sequences of a microbatch if `max_tokens` is None.
        max_tokens: most tokens of a microbatch, including padding; a single sequence may have more.
        shared: in packed rows, a prompt that several sequences share stands once. Its family stays together; if it does
            not fit, it continues in the next microbatch, which repeats the prompt.
    """
    lengths = [len(sequence.tokens_T) for sequence in sequences]
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    added: list[int] = []
    if packed and shared:
        order, added = _by_family(sequences)
    if max_tokens is None:
        return [order[start : start + size] for start in range(0, len(order), size)]
    if packed and shared:
        return _filled_evenly(lengths, order, added, max_tokens)
    longest_first = order[::-1]  # largest microbatches first: later ones reuse their memory
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


def families(sequences: Sequence[Sample]) -> list[list[int]]:
    """Return families of sequences with the same prompt, as indices, in the order of their first members."""
    found: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        found.setdefault(sequence.tokens_T[: sequence.prompt_len].tobytes(), []).append(index)
    return list(found.values())


def _by_family(sequences: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """Return all sequences, family by family, and the tokens that each adds to a row after the one before it.

    Families with most tokens come first, in each the longest sequence first. Others of a family add no prompt.
    """
    lengths = [len(sequence.tokens_T) for sequence in sequences]
    order: list[int] = []
    added: list[int] = []
    for family in sorted(families(sequences), key=lambda family: -sum(lengths[index] for index in family)):
        first, *others = sorted(family, key=lambda index: -lengths[index])
        order += [first, *others]
        added += [lengths[first], *(lengths[index] - sequences[index].prompt_len for index in others)]
    return order, added


def _filled_evenly(
    lengths: Sequence[int], order: Sequence[int], added: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Fill as few rows as the order needs, each until the next sequence does not fit, and of similar size.

    A small pass leaves the device idle.
    """

    def filled(limit: int) -> tuple[list[int], list[list[int]]]:
        loads: list[int] = []
        rows: list[list[int]] = []
        for index, more in zip(order, added, strict=True):
            if rows and loads[-1] + more <= limit:
                rows[-1].append(index)
                loads[-1] += more
            else:
                rows.append([index])
                loads.append(lengths[index])  # a family that goes on repeats its prompt
        return loads, rows

    loads, rows = filled(max_tokens)
    even = math.ceil(sum(loads) / max(1, len(rows)))
    for limit in range(even, max_tokens, max(1, max(lengths, default=0) // 4)):
        other_loads, others = filled(limit)
        if len(others) <= len(rows):
            loads, rows = other_loads, others
            break
    return [row for _, row in sorted(zip(loads, rows, strict=True), key=lambda pair: -pair[0])]


def deal(sequences: Sequence[Sample], processes: int, *, shared: bool = False) -> list[list[Sample]]:
    """Return shares with about the same number of tokens: each sequence, longest first, joins the smallest share.

    Shared prompts are computed once, so with `shared` the list is ordered by family, and split where a share is full.
    """
    if processes == 1:
        return [list(sequences)]
    lengths = [len(sequence.tokens_T) for sequence in sequences]
    shares: list[list[int]] = [[] for _ in range(processes)]
    if not shared:
        loads = [0] * processes
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            least = loads.index(min(loads))
            shares[least].append(index)
            loads[least] += lengths[index]
        return [[sequences[index] for index in share] for share in shares]
    order, added = _by_family(sequences)
    place = 0
    for share, others in zip(shares, reversed(range(processes)), strict=True):  # others: number of shares after this
        load, target = 0.0, sum(added[place:]) / (others + 1)
        while place < len(order) - others and (not share or load + added[place] / 2 <= target):
            load += added[place] if share else lengths[order[place]]
            share.append(order[place])
            place += 1
    shares[-1] += order[place:]
    return [[sequences[index] for index in share] for share in shares]


# ---------------------------------------------------------------- tensors


def split(
    sequences: Sequence[Sample],
    size: int,
    *,
    max_tokens: int | None = None,
    packed: bool = False,
    shared: bool = False,
) -> list[MicroBatch]:
    """Return the microbatches that `plan` chooses; see there."""
    chosen = plan(sequences, size=size, max_tokens=max_tokens, packed=packed, shared=shared)
    return [_microbatch([sequences[index] for index in indices], packed, shared) for indices in chosen]


def idle_microbatch(packed: bool, shared: bool) -> MicroBatch:
    """Return a small microbatch whose gradients are 0, as its tokens' weight is 0.

    No length or number in its layout is 0 or 1, because torch compiles again for these.
    """
    return _microbatch([Sample(np.zeros(4, np.int64), np.array([2, 3]))] * 2, packed, shared)


def layout(alone: Sequence[int], kin: Sequence[tuple[int, Sequence[int]]] = ()) -> Packed:
    """Return the layout of shared prompts, their completions and the other sequences, end to end.

    `alone` are lengths of sequences that share no prompt. `kin` has for each shared prompt its length, and the lengths
    of the whole sequences that begin with it.
    """
    prompts = [prompt for prompt, _ in kin]
    completions = [length - prompt for prompt, lengths in kin for length in lengths]
    lengths = [*prompts, *completions, *alone]
    # Position of each piece's first token in its sequence: a completion begins after its prompt.
    first = [0] * len(kin) + [prompt for prompt, lengths in kin for _ in lengths] + [0] * len(alone)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1] - first, lengths)
    shared = None
    if kin:
        readers = [sum(lengths) - prompt * len(lengths) for prompt, lengths in kin]
        shared = SharedPrompts(
            prompts=_int32([0, *np.cumsum(prompts)]),
            readers=_int32([0, *np.cumsum(readers)]),
            longest_prompt=max(prompts),
            longest_readers=max(readers),
            first=sum(prompts),
            last=sum(prompts) + sum(readers),
        )
    return Packed(_int32(boundaries), torch.from_numpy(positions)[None], max(lengths), shared)


def _int32(values: Sequence[int] | NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.int32))


def _microbatch(sequences: Sequence[Sample], packed: bool, shared: bool = False) -> MicroBatch:
    counts = [len(sequence.positions) for sequence in sequences]
    lengths = [len(sequence.tokens_T) for sequence in sequences]

    def each(values: Iterable[float | bool | int], dtype: type) -> Tensor:
        """Return a value of each sequence for each of its trained tokens."""
        return torch.from_numpy(np.repeat(np.asarray([*values], dtype), counts))

    def flat(values: Iterable[NDArray[np.float32] | None]) -> Tensor:
        """Return values of trained tokens; 0 for a sequence that has none."""
        rows = [np.zeros(n, np.float32) if row is None else row for row, n in zip(values, counts, strict=True)]
        return torch.from_numpy(np.concatenate(rows, dtype=np.float32))

    kin: list[list[int]] = []
    if packed and shared:
        # Without a family, the first sequence counts as one: torch compiles again for a row without shared prompts.
        kin = [family for family in families(sequences) if len(family) > 1] or [[0]]
    related = [index for family in kin for index in family]
    alone = [index for index in range(len(sequences)) if index not in {*related}]
    # Pieces, in the order in which they lie: the sequence, and the positions in it of the piece's first and last token.
    pieces = [(family[0], 0, sequences[family[0]].prompt_len) for family in kin]
    pieces += [(index, sequences[index].prompt_len, lengths[index]) for index in related]
    pieces += [(index, 0, lengths[index]) for index in alone]
    if packed:
        of_kin = [(sequences[family[0]].prompt_len, [lengths[index] for index in family]) for family in kin]
        row = layout([lengths[index] for index in alone], of_kin)
        starts, shape = row.boundaries.tolist(), (1, row.positions_1T.shape[1])
    else:  # a row each, with a gap up to the longest
        row = None
        starts, shape = range(0, len(sequences) * max(lengths), max(lengths)), (len(sequences), max(lengths))
    tokens_P = np.full(math.prod(shape), PAD_ID, np.int64)
    routed = next((sequence.experts.shape for sequence in sequences if sequence.experts is not None), None)
    experts_PLK = None if routed is None else np.full((len(tokens_P), routed.layers, routed.top_k), -1, np.int16)
    targets: dict[int, NDArray[np.int64]] = {}
    predictors: dict[int, NDArray[np.int64]] = {}
    prompt_ends = {index: end for family, end in zip(kin, starts[1:], strict=False) for index in family}
    for number, ((index, first, end), at) in enumerate(zip(pieces, starts, strict=False)):
        sequence = sequences[index]
        tokens_P[at : at + end - first] = sequence.tokens_T[first:end]
        if experts_PLK is not None and sequence.experts is not None:  # of a prompt: its first sequence's
            rows = sequence.experts.ids_TLK[first:end]
            experts_PLK[at : at + len(rows)] = rows
        if number >= len(kin):
            targets[index] = at - first + sequence.positions
            predictors[index] = targets[index] - 1
            if index in prompt_ends:  # its first trained token follows the prompt, which lies elsewhere
                predictors[index][0] = prompt_ends[index] - 1
    in_order = range(len(sequences))
    places_N = np.concatenate([targets[index] for index in in_order])
    teacher_ids_NK, teacher_logprobs_NK = _teachers(sequences)
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_P.reshape(shape)),
        packed=row,
        predictors_N=torch.from_numpy(np.concatenate([predictors[index] for index in in_order])),
        targets_N=torch.from_numpy(tokens_P[places_N]),
        rows_N=each(in_order, np.int64),
        columns_N=torch.from_numpy(np.concatenate([sequence.positions for sequence in sequences])),
        advantages_N=flat(sequence.advantages for sequence in sequences),
        weights_N=each((sequence.weight for sequence in sequences), np.float32),
        shares_N=each((sequence.share for sequence in sequences), np.float32),
        rollout_logprobs_N=flat(sequence.rollout_logprobs for sequence in sequences),
        has_rollout_N=each((sequence.rollout_logprobs is not None for sequence in sequences), np.bool_),
        temperature_N=each((sequence.temperature for sequence in sequences), np.float32),
        supervised_N=each((sequence.supervised for sequence in sequences), np.bool_),
        teacher_ids_NK=torch.from_numpy(teacher_ids_NK),
        teacher_logprobs_NK=torch.from_numpy(teacher_logprobs_NK),
        versions_B=torch.tensor([-1 if sequence.version is None else sequence.version for sequence in sequences]),
        numbers_B=torch.tensor([sequence.number for sequence in sequences]),
        experts_PLK=None if experts_PLK is None else torch.from_numpy(experts_PLK),
    )


def _teachers(sequences: Sequence[Sample]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the teachers' tokens and logprobs for all trained tokens, padded to the largest K."""
    width = max((s.teacher.ids_NK.shape[1] for s in sequences if s.teacher is not None), default=0)
    count = sum(len(sequence.positions) for sequence in sequences)
    ids_NK, logprobs_NK = np.zeros((count, width), np.int64), np.full((count, width), -np.inf, np.float32)
    start = 0
    for sequence in sequences:
        rows = slice(start, start := start + len(sequence.positions))
        if (teacher := sequence.teacher) is not None:
            ids_NK[rows, : teacher.ids_NK.shape[1]] = teacher.ids_NK
            logprobs_NK[rows, : teacher.ids_NK.shape[1]] = teacher.logprobs_NK
    return ids_NK, logprobs_NK
