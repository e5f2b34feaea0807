"""Fork workers from the engine's process, which has made their imports; vLLM's server spawns them."""

from typing import Any

from vllm_server import forking, seams


def fork() -> None:
    """Have vLLM fork workers where this is safe. Call it in the engine's process.

    Raises:
        FatalError: this vLLM starts workers elsewhere.
    """
    executor = seams.seam("vllm.v1.executor.multiproc_executor", "get_mp_context")
    vllms = executor.get_mp_context

    def context() -> Any:
        return forking.for_workers() or vllms()

    vars(executor)["get_mp_context"] = context
