"""Keep what top-p, top-k and min-p kept: sampling masks, from vLLM's sampler to the server's answer.

A trainer needs the kept tokens of each sampled one, to renormalise over the same set. vLLM returns them from 0.28 on
(`return_sampling_mask`), but only if every request has a top_k, and not with its older model runner. So masks travel
here with the logprobs, which have their way through all of vLLM in all versions:

    sampler           after sampling, processed logits are -inf where a token was left out: one bit for each token
    LogprobsTensors   `KeptTensors` are the sampler's, with these bits, moved to the host by the same asynchronous copy
    LogprobsLists     `KeptLists`; a request's slice has its kept ids as further columns of `logprob_token_ids`
    LogprobsProcessor in the server's process, takes them off again (`vllm_server.sampling_masks`)

A batch without top-p, top-k and min-p, or without logprobs, has none of this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from vllm_server import seams

MODE = "processed_logprobs"
"""The only `--logprobs-mode` in which logprobs, and so masks, are those of the distribution that was sampled from."""

WHOLE = -1
"""In the place of kept ids: all were kept. Without it, a vLLM that lost the masks on the way could not be noticed."""

_KEPT = "grpo_kept"
"""Attribute of a sampler between the end of `sample` and the end of its caller."""


class KeptTensors(LogprobsTensors):
    """A batch's logprobs, with the kept tokens of each row as bits."""

    bits_NW: Tensor

    @classmethod
    def of(cls, tensors: LogprobsTensors, bits_NW: Tensor) -> KeptTensors:
        made = cls(*tensors)
        made.bits_NW = bits_NW
        return made

    def to_cpu_nonblocking(self) -> KeptTensors:
        bits_NW = self.bits_NW.to("cpu", non_blocking=self.bits_NW.is_cuda)
        return KeptTensors.of(super().to_cpu_nonblocking(), bits_NW)

    def tolists(self, *args: Any, **kwargs: Any) -> LogprobsLists:
        made = KeptLists(*super().tolists(*args, **kwargs))
        made.kept_M, made.ends_N = kept_ids(self.bits_NW.cpu().numpy())
        return made


class KeptLists(LogprobsLists):
    """The same on the host, with the kept ids of all rows, and where those of each row end."""

    kept_M: NDArray[np.int32]
    ends_N: NDArray[np.int64]

    def slice_request(self, req_idx: int, num_positions: int) -> LogprobsLists:
        """Return the logprobs of a request's new token. Its kept ids, or `WHOLE`, are columns that have no logprob."""
        own = super().slice_request(req_idx, num_positions)
        if num_positions != 1 or self.cu_num_generated_tokens is not None:  # speculative decoding: no masks
            return own
        kept = self.kept_M[self.ends_N[req_idx] : self.ends_N[req_idx + 1]]
        kept = kept if len(kept) else np.array([WHOLE])
        ids = np.concatenate([own.logprob_token_ids, kept[None].astype(own.logprob_token_ids.dtype)], axis=1)
        return own._replace(logprob_token_ids=ids)


def bits_of(processed_NV: Tensor) -> Tensor:
    """Return one bit for each token that is not left out (`-inf`), lowest first, uint8, in whole words of 64.

    A row from which nothing is left out has no bits.
    """
    kept_NV = processed_NV > -torch.inf
    kept_NV &= ~kept_NV.all(-1, keepdim=True)
    kept_NV = torch.nn.functional.pad(kept_NV, (0, -kept_NV.shape[1] % 64))
    places = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=kept_NV.device)
    return (kept_NV.unflatten(1, (-1, 8)) * places).sum(-1, dtype=torch.uint8)


def kept_ids(bits_NW: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the ids whose bits are set, row by row, and for each n from 0 to N how many belong to the first n rows.

    Only words with a bit are unpacked: most of a vocabulary was left out.
    """
    words = np.ascontiguousarray(bits_NW).view(np.uint64)
    count, width = words.shape
    some = np.flatnonzero(words)
    bits = np.unpackbits(words.reshape(-1)[some].view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    found = np.flatnonzero(bits)
    word = some[found // 64]
    ends_N = np.searchsorted(word, width * np.arange(count + 1))
    return (64 * (word % width) + found % 64).astype(np.int32), ends_N


def prepare_worker() -> None:
    """Have vLLM's samplers, of both its model runners, keep the tokens that they kept. Call before a model is loaded.

    Raises:
        FatalError: this vLLM samples elsewhere.
    """
    older = seams.found("vllm.v1.sample.sampler", "Sampler")
    _watch(older, "forward", _cut_by_metadata)
    try:
        newer = seams.found("vllm.v1.worker.gpu.sample.sampler", "Sampler")
    except ImportError:  # its kernels are Triton's, which a CPU has not
        return
    watch_newer(newer)


def watch_newer(sampler: Any) -> None:
    """Prepare the newer model runner's sampler, unless its `sample` does not say which requests it has."""
    names = [*inspect.signature(sampler.sample).parameters]
    if "idx_mapping_np" in names:
        place = names.index("idx_mapping_np") - 1
        _watch(sampler, "__call__", lambda own, args: _cut_by_states(own.sampling_states, args[place]))


def _watch(sampler: Any, caller: str, is_cut: Callable[[Any, tuple[Any, ...]], bool]) -> None:
    """Wrap `sample`, which returns what it sampled from, and its caller, which returns logprobs.

    Args:
        is_cut: from the sampler and the positional arguments of `sample`, whether tokens may be left out.
    """
    sample, call = sampler.sample, getattr(sampler, caller)

    def sample_and_keep(self: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        sampled, processed = sample(self, logits, *args, **kwargs)
        if processed is not None and self.logprobs_mode == MODE and is_cut(self, (logits, *args)):
            vars(self)[_KEPT] = bits_of(processed)
        return sampled, processed

    def call_and_attach(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = call(self, *args, **kwargs)
        kept = vars(self).pop(_KEPT, None)
        # With "logprobs: -1" the whole vocabulary is returned, without ids.
        if kept is not None and output.logprobs_tensors is not None and output.logprobs_tensors[0].ndim == 2:
            output.logprobs_tensors = KeptTensors.of(output.logprobs_tensors, kept)
        return output

    sampler.sample = sample_and_keep
    setattr(sampler, caller, call_and_attach)


def _cut_by_metadata(_: Any, args: tuple[Any, ...]) -> bool:
    metadata = args[1]
    if metadata.max_num_logprobs is None:
        return False
    min_p = any(getattr(one, "min_p_count", 0) for one in metadata.logitsprocs.argmax_invariant)
    return min_p or metadata.top_k is not None or metadata.top_p is not None


def _cut_by_states(states: Any, rows: NDArray[np.integer]) -> bool:
    some_logprobs = bool((states.num_logprobs[rows] >= 0).any())
    top_k, top_p, min_p = (getattr(states, name).np[rows] for name in ("top_k", "top_p", "min_p"))
    return some_logprobs and bool((top_k != states.vocab_size).any() or (top_p != 1.0).any() or (min_p != 0.0).any())


def gives_masks(sampler: Any) -> bool:
    """Return whether a sampler was prepared, and has the mode in which there are masks."""
    wrapped = getattr(type(sampler), "sample", None)
    return getattr(wrapped, "__module__", None) == __name__ and sampler.logprobs_mode == MODE
