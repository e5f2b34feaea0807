"""Check whether the engine can serve a PEFT LoRA adapter, before the engine reads it.

The checks read only the JSON text and the safetensors header: no torch, and milliseconds for any adapter size.
The engine would refuse most bad adapters too, but with a stack trace, and it would serve some of them wrongly.
"""

import json
import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from vllm_server.errors import ServeError
from vllm_server.protocol import SERVABLE, refusals
from vllm_server.protocol.flat import Header, decode_header, read_header

WEIGHTS_FILE = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
CONFIG_KEY = "adapter_config"  # key of a safetensors body's metadata that holds the configuration


_CONFIG_LIMIT = 1 << 20  # bytes of adapter_config.json
_SHOWN = 200  # characters of a value that a refusal shows
_LARGEST_ALPHA = 3.4e38  # of float32
_UNDERSTOOD = (*SERVABLE, "r", "lora_alpha", "target_modules", "use_rslora")


def check_folder(adapter_path: str, roots: tuple[Path, ...], *, max_rank: int) -> tuple[Path, dict[str, Any], Path]:
    """Return an adapter's folder, its configuration, and the path of its weights, if the engine can serve it.

    The paths are real ones, with symbolic links resolved, under one of `roots` (real paths, too).

    Raises:
        ServeError: 403 outside the roots, 404 no such folder or file, 422 not a path, or a file that is damaged or not
            servable.
    """
    try:
        path = Path(adapter_path).expanduser().resolve()
        is_there = path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, an unknown user, circular links
        got = f"{adapter_path[:_SHOWN]!r} ({_reason(error)})"
        raise ServeError(422, "adapter_path", got, "a folder's path", "correct it") from error
    _check_inside(path, roots)
    if not is_there:
        fix = "save the adapter first, by save_pretrained(), on a disk that the server sees"
        raise ServeError(404, "adapter_path", path, "a folder that this server can read", fix)
    with _opened(path / _CONFIG, roots) as stream:
        text = stream.read(_CONFIG_LIMIT + 1)
        try:
            if len(text) > _CONFIG_LIMIT:
                raise ValueError(f"more than {_CONFIG_LIMIT} bytes")
            config = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ServeError(422, _CONFIG, got=error, wanted="JSON", fix="save the adapter again") from error
        _check_is_object(config, _CONFIG)
    check_config(config, max_rank=max_rank)
    with _opened(path / WEIGHTS_FILE, roots) as stream:
        check_header(_read_header(stream), config["r"])
        return path, config, _real_path(stream)


def _check_inside(path: Path, roots: tuple[Path, ...]) -> None:
    if not any(path.is_relative_to(root) for root in roots):
        wanted, fix = f"a place under {' or '.join(map(str, roots))}", f"--lora-root {path.parent}"
        raise ServeError(403, "adapter_path", path, wanted, f"save it there, or start the server with {fix}")


@contextmanager
def _opened(path: Path, roots: tuple[Path, ...]) -> Iterator[BinaryIO]:
    """Open a file of an adapter's folder: a regular file under `roots`. Opening never blocks.

    A symbolic link may point anywhere under the roots. The check runs on the open file, because the path may change
    between the check and the opening.
    """
    try:
        real = path.resolve(strict=True)
        _check_inside(real, roots)
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        got, fix = f"{path.parent} without {path.name}", "save_pretrained(folder, safe_serialization=True)"
        raise ServeError(404, "adapter_path", got, f"{_CONFIG} and {WEIGHTS_FILE}", f"save it by {fix}") from None
    except (OSError, RuntimeError) as error:
        raise _no_file(path.name, _reason(error)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_file(path.name, "no regular file")
    with os.fdopen(descriptor, "rb") as stream:
        _check_inside(_real_path(stream), roots)
        yield stream


def _real_path(stream: BinaryIO) -> Path:
    return Path(f"/proc/self/fd/{stream.fileno()}").readlink()


def _no_file(name: str, got: str) -> ServeError:
    return ServeError(422, name, got=got, wanted="a regular file that this server can read", fix="save it again")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).partition(":")[0][:_SHOWN]


def understood(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an adapter's configuration that this server has checked."""
    return {key: config[key] for key in _UNDERSTOOD if key in config}


def check_file(file: Path, *, max_rank: int) -> dict[str, Any]:
    """Return the configuration in a safetensors file's metadata; raise a ServeError, 422, if it is not servable."""
    with file.open("rb") as stream:
        header = _read_header(stream)
    try:
        config = json.loads(header.metadata[CONFIG_KEY])
    except (KeyError, ValueError, RecursionError) as error:
        wanted = "adapter_config.json in the metadata"
        raise ServeError(422, CONFIG_KEY, repr(error), wanted, "put it there") from error
    _check_is_object(config, CONFIG_KEY)
    check_config(config, max_rank=max_rank)
    check_header(header, config["r"])
    return config


def check_config(config: dict[str, Any], *, max_rank: int) -> None:
    """Raise a ServeError, 422, if the engine cannot serve an adapter with this adapter_config.json."""
    for refusal in refusals(config, max_rank):
        raise ServeError(422, refusal.field, got=refusal.got[:_SHOWN], wanted=refusal.wanted, fix=refusal.fix)
    # PEFT has a default for these two, and vLLM does not.
    alpha, modules = config.get("lora_alpha"), config.get("target_modules")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _LARGEST_ALPHA:
        raise _no_field("lora_alpha", alpha, "a number")
    if not (isinstance(modules, str) or (isinstance(modules, list) and all(isinstance(m, str) for m in modules))):
        raise _no_field("target_modules", modules, "names of modules")
    if not isinstance(config.get("use_rslora"), bool | None):
        raise _no_field("use_rslora", config["use_rslora"], "true or false")


def _no_field(key: str, value: object, wanted: str) -> ServeError:
    return ServeError(422, key, got=reprlib.repr(value), wanted=wanted, fix="save the adapter by save_pretrained()")


def _check_is_object(config: object, where: str) -> None:
    if not isinstance(config, dict):
        raise ServeError(422, where, got=type(config).__name__, wanted="an object", fix="save it again")


def check_header(header: Header, rank: int) -> None:
    """Raise a ServeError, 422, unless A (with `rank` rows) and B (with as many columns) come in pairs."""
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
                    got = f"shape {list(span.shape)}"
                    raise ServeError(422, span.name, got, f"rank {rank}", "save the adapter again")
    lonely = [head for head, parts in modules.items() if parts != {"A", "B"}]
    if lonely or not modules:
        got = f"no A and B together for {lonely[0]}" if lonely else f"{len(header.spans)} tensors, none of LoRA"
        wanted, fix = "a pair lora_A, lora_B for each target module", "save the adapter by save_pretrained()"
        raise ServeError(422, WEIGHTS_FILE, got, wanted, fix)


def _read_header(stream: BinaryIO) -> Header:
    try:
        header = decode_header(read_header(stream))
        if (size := os.fstat(stream.fileno()).st_size) < (whole := header.size + header.nbytes):
            raise ValueError(f"a file that ends early ({size} of {whole} bytes)")
        return header
    except ValueError as error:
        wanted, fix = "a whole safetensors file", "save the adapter again"
        raise ServeError(422, WEIGHTS_FILE, error, wanted, fix) from error
