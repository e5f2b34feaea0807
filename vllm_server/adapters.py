"""Is the folder a PEFT LoRA checkpoint that the engine can serve? Read before the engine sees it.

Only the JSON text and the safetensors header are read: no torch, milliseconds whatever the adapter's size.
The engine would refuse most of these cases too, but by a stack trace, and some it would serve wrongly.
"""

import json
import struct
from pathlib import Path
from typing import Any

from vllm_server.errors import ServeError
from vllm_server.protocol.adapter_config import refusals

_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_HEADER_LIMIT = 100 << 20  # bytes; safetensors' own limit


def allowed_path(adapter_path: str, roots: tuple[Path, ...]) -> Path:
    """The adapter's real folder: once symbolic links are followed, it lies under one of `roots` (real paths).

    Raises:
        ServeError: 403 outside the roots, 404 no such folder.
    """
    path = Path(adapter_path).expanduser().resolve()
    if not any(path.is_relative_to(root) for root in roots):
        raise ServeError(
            403,
            "adapter_path",
            got=path,
            wanted=f"a folder under {' or '.join(map(str, roots))}",
            fix=f"save it there, or start the server with --lora-root {path.parent}",
        )
    if not path.is_dir():
        raise ServeError(
            404,
            "adapter_path",
            got=path,
            wanted="a folder that this server can read",
            fix="save the adapter first, by save_pretrained(), on a disk that the server sees",
        )
    return path


def check_adapter(path: Path, *, max_rank: int) -> dict[str, Any]:
    """The adapter's configuration, if the engine can serve it.

    Raises:
        ServeError: 404 a file is missing, 422 it is damaged or not servable.
    """
    config = _read_config(path)
    for refusal in refusals(config, max_rank):
        raise ServeError(422, refusal.field, got=refusal.got, wanted=refusal.wanted, fix=refusal.fix)
    _check_weights(path / _WEIGHTS, config["r"])
    return config


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / _CONFIG).read_text())
    except FileNotFoundError:
        raise _missing(path, _CONFIG) from None
    except ValueError as error:
        raise ServeError(422, _CONFIG, got=error, wanted="JSON", fix="save the adapter again") from error
    if not isinstance(config, dict):
        raise ServeError(422, _CONFIG, got=type(config).__name__, wanted="an object", fix="save it again")
    return config


def _check_weights(file: Path, rank: int) -> None:
    """Every LoRA A has `rank` rows and every B `rank` columns, and each has its partner."""
    tensors = _read_header(file)
    modules: dict[str, set[str]] = {}
    for name, shape in tensors.items():
        for part, rank_axis in (("A", 0), ("B", -1)):
            head, found, _ = name.partition(f".lora_{part}.")
            if not found:
                head, found, _ = name.partition(f".lora_embedding_{part}")
            if found:
                modules.setdefault(head, set()).add(part)
                # Expert weights are packed as [experts × rank, …]; vLLM unpacks and checks those itself.
                if len(shape) == 2 and shape[rank_axis] % rank:
                    raise ServeError(
                        422, name, got=f"shape {shape}", wanted=f"rank {rank}", fix="save the adapter again"
                    )
    lonely = [head for head, parts in modules.items() if parts != {"A", "B"}]
    if lonely or not modules:
        raise ServeError(
            422,
            _WEIGHTS,
            got=f"no A and B together for {lonely[0]}" if lonely else f"{len(tensors)} tensors, none of LoRA",
            wanted="a pair lora_A, lora_B for each target module",
            fix="save the adapter by save_pretrained()",
        )


def _read_header(file: Path) -> dict[str, list[int]]:
    """Tensor name → shape, from the header of a safetensors file: 8 bytes of length, then JSON."""
    try:
        with file.open("rb") as stream:
            size = struct.unpack("<Q", stream.read(8))[0]
            if size > _HEADER_LIMIT:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            data_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if file.stat().st_size < 8 + size + data_bytes:
            raise ValueError("a file that ends early")
        return {name: list(entry["shape"]) for name, entry in header.items()}
    except FileNotFoundError:
        raise _missing(file.parent, file.name) from None
    except (ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise ServeError(
            422, file.name, got=f"{error}", wanted="a whole safetensors file", fix="save the adapter again"
        ) from error


def _missing(folder: Path, name: str) -> ServeError:
    return ServeError(
        404,
        "adapter_path",
        got=f"{folder} without {name}",
        wanted=f"{_CONFIG} and {_WEIGHTS}",
        fix="save the adapter by save_pretrained(folder, safe_serialization=True)",
    )
