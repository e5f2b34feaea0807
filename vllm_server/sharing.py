"""A server whose weights a trainer writes: its checks at the start, and the bridge file of shared weights."""

import logging
import os
from argparse import Namespace
from collections.abc import Sequence

from grpo_common.http import address
from vllm_server import compat, model_check, seams, shared_engine, sharing_checks
from vllm_server.bridge_file import BridgeFile
from vllm_server.errors import FatalError
from vllm_server.protocol import WorkerInfo, machine_id
from vllm_server.protocol.bridge_config import SCHEMA_VERSION, BridgeConfigFile, ParamMapping, RankWeights
from vllm_server.shared_engine import SharedEngine
from vllm_server.worker.shared_weights import Exported

logger = logging.getLogger("vllm.grpo.sharing")

_WITHOUT_EFFECT = ("VLLM_SKIP_WEIGHT_DAEMON", "NUM_INFERENCE_NODES")

_REACHED_BY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # servers that listen on all addresses


def prepare(args: Namespace) -> None:
    """Refuse unsupported settings before anything is loaded, and set the vLLM flags that plain weights need.

    Raises:
        FatalError: see `sharing_checks`, `bridge_file` and `shared_engine`.
    """
    set_in_vain = [name for name in _WITHOUT_EFFECT if name in os.environ]
    if set_in_vain:
        logger.warning("%s: accepted, without effect", ", ".join(set_in_vain))
    if not (args.shared_weights or args.receive_weights):
        return
    if args.shared_weights and args.receive_weights:
        raise FatalError(
            field="--receive-weights", got="--shared-weights with it", wanted="one of them", fix="leave one out"
        )
    try:
        config = model_check.read_config(args.model)
    except (OSError, ValueError):
        config = {}  # `check_model` reports the error
    device = compat.device_type()
    if args.shared_weights:
        sharing_checks.check_shareable(args, config, device, os.environ, os.uname().release)
        bridge_file(args).check()
    else:
        sharing_checks.check_receivable(args, config, device)
    shared_engine.assert_seams()
    if device == "cuda":
        args.moe_backend = "triton"  # the triton backend does not reorder experts' weights


def bridge_file(args: Namespace) -> BridgeFile:
    """Return the place of this server's bridge file."""
    return BridgeFile.choose(args.bridge_config_path, os.environ)


async def export(engine: SharedEngine, args: Namespace, boot_id: str, workers: Sequence[WorkerInfo]) -> BridgeFile:
    """Share the weights and write the bridge file.

    Args:
        workers: by rank.

    Raises:
        FatalError: the weights cannot be shared, or the file cannot be written.
    """
    first, *others = await engine.export()
    handles = first.handles
    file = bridge_file(args)
    file.write(
        BridgeConfigFile(
            model=str(engine.engine.vllm_config.model_config.model),
            tp_degree=len(workers),
            dp_shard_degree=1,
            param_names=list(handles),
            param_mappings=_mappings(first),
            ipc_handles=handles,
            shared_weights_enabled=True,
            single_copy_enabled=True,
            num_params=len(handles),
            schema_version=SCHEMA_VERSION,
            kind="cuda_ipc" if compat.device_type() == "cuda" else "file",
            server_url=server_url(args),
            server_pid=os.getpid(),
            boot_id=boot_id,
            machine=machine_id(),
            gpu_uuid=workers[0].gpu_uuid,
            vllm_version=seams.vllm_version(),
            torch_version=first.torch_version,
            further_ranks=[
                RankWeights(
                    rank=each.rank,
                    param_mappings=_mappings(each),
                    ipc_handles=each.handles,
                    gpu_uuid=workers[each.rank].gpu_uuid,
                )
                for each in others
            ],
        )
    )
    logger.info("Exported %d IPC handles for single-copy mode: %s", len(handles), file.path)
    return file


def _mappings(exported: Exported) -> dict[str, ParamMapping]:
    return {
        name: ParamMapping(vllm_name=name, shape=handle.shape, dtype=handle.dtype, device=exported.device)
        for name, handle in exported.handles.items()
    }


def server_url(args: Namespace) -> str:
    """Return the URL by which a trainer on this machine reaches the server."""
    if args.uds:
        return f"unix:{args.uds}"
    host = args.host or ""
    host = _REACHED_BY.get(host, host)
    scheme = "https" if args.ssl_keyfile else "http"
    return f"{scheme}://{address(host, args.port)}"
