"""Sampling masks of a microbatch's tokens as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_trainer.rollouts.sampling_masks import SamplingMasks

LEFT_OUT = -1e30
"""Logit of a token that was left out. Its probability is 0; with -inf, the entropy's p * log(p) would be NaN."""


@dataclass(frozen=True)
class TokenMasks:
    """The ids that sampling kept at some of N tokens; the other tokens have no mask.

    Attributes:
        masked_C: the C tokens with a mask, ascending.
        rows_M, ids_M: each kept id, and its token; ordered by token.
        ends_C, ends_M: for each n from 0 to N how many entries of `masked_C`, and of `rows_M` and `ids_M`, belong to
            the first n tokens. They stay in main memory, so that a slice of the tensors needs no wait for a GPU.
    """

    masked_C: Tensor
    rows_M: Tensor
    ids_M: Tensor
    ends_C: NDArray[np.int64]
    ends_M: NDArray[np.int64]

    @classmethod
    def of(cls, masks: Sequence[SamplingMasks | None], lengths: Sequence[int]) -> TokenMasks | None:
        """Return the masks of several sequences one after another; None: none of them has any.

        Args:
            lengths: tokens of each sequence.
        """
        given = [one for one in masks if one is not None]
        if not given:
            return None
        each = [np.zeros(n, np.int64) if one is None else one.counts_T for one, n in zip(masks, lengths, strict=True)]
        counts_N = np.concatenate(each)
        return cls(
            masked_C=torch.from_numpy(np.flatnonzero(counts_N)),
            rows_M=torch.from_numpy(np.repeat(np.arange(len(counts_N)), counts_N)),
            ids_M=torch.from_numpy(np.concatenate([one.ids_M for one in given])),
            ends_C=np.concatenate([[0], np.cumsum(counts_N > 0)]),
            ends_M=np.concatenate([[0], np.cumsum(counts_N)]),
        )

    def within(self, own: range) -> TokenMasks:
        """Return the masks for the logits of the tokens `own` alone."""
        inside_M = (self.ids_M >= own.start) & (self.ids_M < own.stop)
        before = np.concatenate([[0], np.cumsum(inside_M.cpu().numpy())])
        ids_M = self.ids_M[inside_M] - own.start
        return replace(self, rows_M=self.rows_M[inside_M], ids_M=ids_M, ends_M=before[self.ends_M])

    def keep_only_(self, logits_nV: Tensor, own: slice) -> Tensor:
        """Set the logits of left-out tokens to `LEFT_OUT`, in place, and return the tensor.

        The kept set is fixed: kept logits keep their gradients, the others get none.

        Args:
            logits_nV: logits of the tokens `own`, not in fp16, which has no number as small.
        """
        some, each = slice(*self.ends_C[[own.start, own.stop]]), slice(*self.ends_M[[own.start, own.stop]])
        at = self.rows_M[each] - own.start, self.ids_M[each].long()
        kept_m = logits_nV[at]
        return logits_nV.index_fill_(0, self.masked_C[some] - own.start, LEFT_OUT).index_put_(at, kept_m)
