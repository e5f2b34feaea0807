"""One softmax of two parts: a completion's own tokens, and the prompt it shares with others.

Each part has its results and the logs of their normalisers, which weigh them against each other. On a GPU it is one
pass over both results (`attention_kernel`); in torch's own operations it is twelve, with copies in fp32.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""It comes with torch where that has GPUs to compile for."""


def merge(out_RHD: Tensor, normalisers_HR: Tensor, seen_RHD: Tensor, seen_HR: Tensor) -> None:
    """Make the first part that of both, in place.

    Args:
        out_RHD, seen_RHD: results of the parts, each head's numbers side by side.
        normalisers_HR, seen_HR: fp32, the logs of their normalisers, tokens side by side.
    """
    if out_RHD.is_cuda and HAS_TRITON:
        from grpo_trainer.model import attention_kernel

        with torch.cuda.device(out_RHD.device):  # Triton launches on the present device, wherever the tensors are
            attention_kernel.launch(out_RHD, normalisers_HR, seen_RHD, seen_HR)
        return
    whole_HR = torch.logaddexp(normalisers_HR, seen_HR)
    of_own_RH1, of_seen_RH1 = ((each - whole_HR).exp().mT[:, :, None] for each in (normalisers_HR, seen_HR))
    out_RHD.copy_(out_RHD * of_own_RH1 + seen_RHD * of_seen_RH1)
    normalisers_HR.copy_(whole_HR)
