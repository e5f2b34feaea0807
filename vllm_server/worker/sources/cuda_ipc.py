"""Source `cuda_ipc`: the trainer's own parameters, mapped once and copied from GPU memory to GPU memory."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_server.protocol.weights import CudaIpcSource
from vllm_server.worker.packed import Layout
from vllm_server.worker.sources.mapped import MappedWeights
from vllm_server.worker.transports.cuda_ipc import mapped, visible_index


class ParameterMap(MappedWeights):
    """Holds the mapping of the trainer's parameters.

    Args:
        layouts: of the buckets.

    Raises:
        ValueError: this process does not see the trainer's GPU; or see `MappedWeights`.
    """

    def __init__(self, source: CudaIpcSource, layouts: Sequence[Layout]) -> None:
        index = visible_index(source.gpu_uuid)
        super().__init__([mapped(handle, index) for handle in source.storages], source.tensors, layouts)
