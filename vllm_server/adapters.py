"""Is this a PEFT LoRA adapter that the engine can serve? Read before the engine sees it.

Only the JSON text and the safetensors header are read: no torch, milliseconds whatever the adapter's size.
The engine would refuse most of these cases too, but by a stack trace, and some it would serve wrongly.
"""

import json
from math import isfinite
from pathlib import Path
from typing import Any

from vllm_server.errors import ServeError
from vllm_server.protocol.adapter_config import refusals
from vllm_server.protocol.flat import Header, decode_header, read_header

WEIGHTS_FILE = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
CONFIG_KEY = "adapter_config"  # where a body of safetensors holds the configuration: in its metadata


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


def check_folder(path: Path, *, max_rank: int) -> dict[str, Any]:
    """The configuration of the adapter in a folder, if the engine can serve it.

    Raises:
        ServeError: 404 a file is missing, 422 it is damaged or not servable.
    """
    config = _read_config(path)
    check_config(config, max_rank=max_rank)
    check_header(_read_header(path / WEIGHTS_FILE), config["r"])
    return config


def check_file(file: Path, *, max_rank: int) -> dict[str, Any]:
    """The same for a safetensors file that holds its configuration in its metadata.

    Raises:
        ServeError: 422, it is damaged or not servable.
    """
    header = _read_header(file)
    try:
        config = json.loads(header.metadata[CONFIG_KEY])
    except (KeyError, ValueError) as error:
        raise ServeError(
            422, CONFIG_KEY, got=f"{error!r}", wanted="adapter_config.json in the metadata", fix="put it there"
        ) from error
    _check_is_object(config, CONFIG_KEY)
    check_config(config, max_rank=max_rank)
    check_header(header, config["r"])
    return config


def check_config(config: dict[str, Any], *, max_rank: int) -> None:
    """Raise a ServeError, 422, if the engine cannot serve an adapter with this adapter_config.json."""
    for refusal in refusals(config, max_rank):
        raise ServeError(422, refusal.field, got=refusal.got, wanted=refusal.wanted, fix=refusal.fix)
    # vLLM reads these two without a default, where PEFT has one.
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not isfinite(alpha):
        raise ServeError(422, "lora_alpha", got=alpha, wanted="a number", fix="save the adapter by save_pretrained()")
    if not isinstance(config.get("target_modules"), str | list):
        raise ServeError(
            422,
            "target_modules",
            got=config.get("target_modules"),
            wanted="names of modules",
            fix="save the adapter by save_pretrained()",
        )


def _check_is_object(config: object, where: str) -> None:
    if not isinstance(config, dict):
        raise ServeError(422, where, got=type(config).__name__, wanted="an object", fix="save it again")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / _CONFIG).read_text())
    except FileNotFoundError:
        raise _missing(path, _CONFIG) from None
    except ValueError as error:
        raise ServeError(422, _CONFIG, got=error, wanted="JSON", fix="save the adapter again") from error
    _check_is_object(config, _CONFIG)
    return config


def check_header(header: Header, rank: int) -> None:
    """Every LoRA A has `rank` rows and every B `rank` columns, and each has its partner.

    Raises:
        ServeError: 422, it is not so.
    """
    modules: dict[str, set[str]] = {}
    for span in header.spans:
        for part, rank_axis in (("A", 0), ("B", -1)):
            head, found, _ = span.name.partition(f".lora_{part}.")
            if not found:
                head, found, _ = span.name.partition(f".lora_embedding_{part}")
            if found:
                modules.setdefault(head, set()).add(part)
                # Expert weights are packed as [experts × rank, …]; vLLM unpacks and checks those itself.
                if len(span.shape) == 2 and span.shape[rank_axis] != rank and ".experts" not in head:
                    shape = list(span.shape)
                    raise ServeError(
                        422, span.name, got=f"shape {shape}", wanted=f"rank {rank}", fix="save the adapter again"
                    )
    lonely = [head for head, parts in modules.items() if parts != {"A", "B"}]
    if lonely or not modules:
        raise ServeError(
            422,
            WEIGHTS_FILE,
            got=f"no A and B together for {lonely[0]}" if lonely else f"{len(header.spans)} tensors, none of LoRA",
            wanted="a pair lora_A, lora_B for each target module",
            fix="save the adapter by save_pretrained()",
        )


def _read_header(file: Path) -> Header:
    try:
        with file.open("rb") as stream:
            header = decode_header(read_header(stream))
        if (size := file.stat().st_size) < (whole := header.size + header.nbytes):
            raise ValueError(f"a file that ends early ({size} of {whole} bytes)")
        return header
    except FileNotFoundError:
        raise _missing(file.parent, file.name) from None
    except ValueError as error:
        raise ServeError(
            422, WEIGHTS_FILE, got=f"{error}", wanted="a whole safetensors file", fix="save the adapter again"
        ) from error


def _missing(folder: Path, name: str) -> ServeError:
    return ServeError(
        404,
        "adapter_path",
        got=f"{folder} without {name}",
        wanted=f"{_CONFIG} and {WEIGHTS_FILE}",
        fix="save the adapter by save_pretrained(folder, safe_serialization=True)",
    )
