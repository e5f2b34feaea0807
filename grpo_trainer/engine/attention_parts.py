"""Merges two parts of a softmax: attention to a completion's own tokens, and to the prompt that it shares.

Each part has a result and the log of its normaliser, which is the part's weight in the merged softmax. On a GPU the
merge is one pass over both results (`attention_kernel`); torch's own operations need twelve, with copies in fp32.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Torch builds for GPUs bring Triton."""


def merge(out_RHD: Tensor, normalisers_HR: Tensor, seen_RHD: Tensor, seen_HR: Tensor) -> None:
    """Merge the second part into the first, in place.

    Args:
        out_RHD, seen_RHD: results of the parts, contiguous within each head.
        normalisers_HR, seen_HR: fp32, the logs of their normalisers, contiguous over tokens.
    """
    if out_RHD.is_cuda and HAS_TRITON:
        from grpo_trainer.engine import attention_kernel

        with torch.cuda.device(out_RHD.device):  # Triton launches on the current device, not on the tensors'
            attention_kernel.launch(out_RHD, normalisers_HR, seen_RHD, seen_HR)
        return
    whole_HR = torch.logaddexp(normalisers_HR, seen_HR)
    of_own_RH1, of_seen_RH1 = ((each - whole_HR).exp().mT[:, :, None] for each in (normalisers_HR, seen_HR))
    out_RHD.copy_(out_RHD * of_own_RH1 + seen_RHD * of_seen_RH1)
    normalisers_HR.copy_(whole_HR)
