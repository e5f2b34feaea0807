"""A report as one line of JSON, or as a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from grpo_trainer.bench.sync.measure import Report


def as_dict(report: Report) -> dict[str, Any]:
    """Flat but for what belongs together: phases, load, memory, proof."""
    options, info, facts = report.options, report.info, report.facts
    load = None if report.load is None else asdict(report.load)
    baseline = {"baseline_ms": None, "baseline_save_ms": None, "baseline_repeat": 0}
    return {
        "bridge": options.choice.bridge,
        "transport": facts.transport,
        "shape": options.model.shape,
        "share_base": options.choice.share_base,
        "lora_r": options.choice.lora_r if options.choice.bridge == "lora_only" else None,
        "repeat": options.repeat,
        "adapter_mb": facts.adapter_mb,
        "dtype": info.dtype.removeprefix("torch."),
        "device": report.device,
        "server_device": info.device,
        "server_workers": len(info.workers),
        "versions": {"vllm": info.vllm_version, "torch": report.torch_version, "python": report.python_version},
        "max_loras": info.max_loras,
        "keep_versions": info.keep_versions,
        "proof": facts.proof,
        **asdict(facts.weights),
        "gpu_total_gb": report.memory.gpu_total_gb,
        **facts.own,
        **asdict(report.publish),
        **(asdict(report.baseline) if report.baseline else baseline),
        "load": load,
        "memory": asdict(report.memory),
        "step": None if report.step is None else asdict(report.step),
    }


def as_table(figures: dict[str, Any]) -> str:
    """Print one figure a line."""
    lines = []
    for name, value in figures.items():
        if isinstance(value, dict):
            lines += [f"{f'{name}.{part}':>34}  {_text(each)}" for part, each in value.items()]
        else:
            lines.append(f"{name:>34}  {_text(value)}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    return " → ".join(map(str, value)) if isinstance(value, (tuple, list)) else "-" if value is None else str(value)
