"""One process in which vLLM loads one tiny model after another, and the trainer's attached model is held against it.

    python -m tests.golden.host FOLDER [ARCHITECTURE ...]

The conditional models need torchvision, which the locks for CPUs leave out: take torch's build of it for CPUs.

For each architecture FOLDER gets `NAME.json`: vLLM's names and shapes, and where each of transformers' parameters was
*found by its content* (which knows nothing of the rules in `names.py`), and vLLM's logprobs with and without an adapter
that the trainer wrote; the committed ones are made this way. And `NAME.figures.json`: how the attached model's logprobs
compare to the server's, before and after a write in place.

On a GPU vLLM's engine runs in a separate process, since no process can open its own CUDA IPC handles.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_trainer.config.train import ModelConfig
from grpo_trainer.model.load import load_model
from grpo_trainer.model.lora import save_adapter
from grpo_trainer.shared.attach import attach_model, open_handles
from grpo_trainer.shared.bridge_file import read_bridge_config, tied_names
from tests.golden.models import (
    ATTENTION,
    CONDITIONAL,
    CONFIGS,
    IN_16_BITS,
    IN_A_PROCESS,
    PROMPT,
    RECORDED,
    WITHOUT_LORA,
    Golden,
    save_model,
    with_adapter,
)
from tests.golden.stand_in import bridge_config, write_config
from vllm_server.protocol.bridge_config import BridgeConfigFile, Exported


@dataclass(frozen=True)
class Figures:
    """Logprobs of one prompt's tokens: mean |difference| in nats.

    Attributes:
        before: attached model and server, on the weights as loaded.
        own: attached model and the one that `load_model` makes of the files: 0 if it is bound right.
        moved: server before and after every parameter was written in place through the attached model.
        after: attached model and server after that.
    """

    before: float
    own: float
    moved: float
    after: float
    attached: int


def main(folder: Path, architectures: Sequence[str]) -> None:
    on_gpu = torch.cuda.is_available()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(on_gpu)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a child forked from here could not use the GPU
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function for `apply_model`
    for name in architectures:
        model = save_model(name, folder / name)
        own = with_adapter(name, load_model(_options(folder / name, on_gpu)))
        (folder / f"{name}.adapter").mkdir()
        save_adapter(own, folder / f"{name}.adapter")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(on_gpu or name in IN_A_PROCESS))
        with _engine(folder / name, on_gpu) as engine:
            served = _served(engine, PROMPT)
            adapted = served[:0] if name in WITHOUT_LORA else _served(engine, PROMPT, folder / f"{name}.adapter")
            (class_name,) = engine.apply_model(attrgetter("__class__.__name__"))
            record = Golden({}, {}, {}, _short(served), _short(adapted), class_name)
            if name not in CONFIGS:
                (folder / f"{name}.json").write_text(record.text())
            else:
                config = _exported(engine, folder / name, on_gpu)
                device = torch.device("cuda" if on_gpu else "cpu")
                memory = open_handles(config, device)
                shapes = {vllm_name: tuple(mapping.shape) for vllm_name, mapping in config.param_mappings.items()}
                found = {own: find(tensor, memory) for own, tensor in model.named_parameters()}
                record = msgspec.structs.replace(record, vllm=shapes, ties=tied_names(config), found=found)
                (folder / f"{name}.json").write_text(record.text())
                attached = attach_model(config, _options(folder / name, on_gpu), device)
                figures = _compare(engine, folder / name, attached, served)
                (folder / f"{name}.figures.json").write_text(json.dumps(asdict(figures)))
                print(name, figures, flush=True)
                del attached, memory
        print(name, class_name, flush=True)


def _short(logprobs: Tensor) -> list[float]:
    return [round(each, 6) for each in logprobs.tolist()]


def find(tensor: Tensor, memory: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    """Every place `[name, first row]` where the tensor's very content stands, whatever it is called."""
    places: list[tuple[str, int]] = []
    rows = tensor.shape[0]
    for name, whole in sorted(memory.items()):
        if whole.shape[1:] != tensor.shape[1:] or whole.shape[0] < rows:
            continue
        wanted = tensor.to(device=whole.device, dtype=whole.dtype)
        same = (whole == wanted[0]).flatten(1).all(1) if whole.dim() > 1 else whole == wanted[0]
        starts = [start for start in same.nonzero().flatten().tolist() if start + rows <= whole.shape[0]]
        places += [(name, start) for start in starts if torch.equal(whole[start : start + rows], wanted)]
    return places


@contextlib.contextmanager
def _engine(folder: Path, on_gpu: bool) -> Any:
    from vllm import LLM

    sizes: dict[str, Any] = {"gpu_memory_utilization": 0.2, "moe_backend": "triton"}
    cpu: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 24, "distributed_executor_backend": "uni"}
    engine = LLM(
        model=str(folder),
        skip_tokenizer_init=folder.name not in CONDITIONAL,
        language_model_only=folder.name in CONDITIONAL,
        dtype="bfloat16" if on_gpu or folder.name in IN_16_BITS else "float32",
        enforce_eager=True,
        max_model_len=256,
        enable_prefix_caching=True,
        enable_lora=folder.name not in WITHOUT_LORA,
        max_lora_rank=8,
        worker_extension_cls="vllm_server.patches.SharingWorker",
        **(sizes if on_gpu else cpu),
    )
    try:
        yield engine
    finally:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        engine.llm_engine.engine_core.shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()


def _exported(engine: Any, folder: Path, on_gpu: bool) -> BridgeConfigFile:
    """Written and read as the server and the trainer do."""
    (answer,) = engine.collective_rpc("grpo_export_weights")
    exported = msgspec.json.decode(answer["exported"], type=Exported)
    config = bridge_config(
        str(folder), exported.handles, gpu_uuid=str(torch.cuda.get_device_properties(0).uuid) if on_gpu else ""
    )
    return read_bridge_config(write_config(folder, config))


def _options(folder: Path, on_gpu: bool) -> ModelConfig:
    attention = ATTENTION.get(folder.name, "sdpa")
    dtype = "bfloat16" if folder.name in IN_16_BITS else "auto"
    return ModelConfig.model_validate(
        {"model_name": str(folder), "attention": attention, "device": "auto", "dtype": dtype}
    )


def _compare(engine: Any, folder: Path, attached: PreTrainedModel, first: Tensor) -> Figures:
    ours = logprobs(attached, PROMPT)
    own = logprobs(load_model(_options(folder, attached.device.type == "cuda")), PROMPT)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in attached.parameters():
            noise = 0.05 * torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(device=parameter.device, dtype=parameter.dtype))
    engine.reset_prefix_cache()
    second = _served(engine, PROMPT)
    return Figures(
        before=difference(first, ours),
        own=difference(own, ours),
        moved=difference(first, second),
        after=difference(second, logprobs(attached, PROMPT)),
        attached=len(list(attached.parameters())),
    )


def difference(one: Tensor, other: Tensor) -> float:
    """Mean |difference|, in nats a token."""
    return (one - other).abs().mean().item()


@torch.no_grad()
def logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Of each token but the first, [token - 1]."""
    ids = torch.tensor([list(tokens)], device=model.device)
    logits = model(input_ids=ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()


def _served(engine: Any, tokens: Sequence[int], adapter: Path | None = None) -> Tensor:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    lora = None if adapter is None else LoRARequest(adapter.name, 1, str(adapter))
    (output,) = engine.generate({"prompt_token_ids": list(tokens)}, sampling, use_tqdm=False, lora_request=lora)
    given = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    return torch.tensor([logprobs_of[token].logprob for token, logprobs_of in given])


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:] or list(RECORDED))
