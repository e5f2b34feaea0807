"""The command `grpo bench fence`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer

from grpo_trainer.bench.command import JsonLine, ServerArgs, run_command, share_cores
from grpo_trainer.bench.fence.options import FenceOptions
from grpo_trainer.config.options import build, with_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@with_options(FenceOptions)
def fence(
    options: dict[str, Any],
    server_arg: ServerArgs = None,
    json_line: JsonLine = False,
) -> None:
    """Write shared weights over and over under load, and judge whether any answer saw them half written.

    Exit code 1 if one did.
    """
    asked = build(FenceOptions, options)
    share_cores()
    from grpo_trainer.bench.fence.measure import measure

    report = measure(asked, tuple(server_arg or ()))
    verdicts = report.verdicts
    figures = {
        "shape": asked.model.shape,
        "device": report.device,
        "vllm": report.vllm_version,
        "in_flight": asked.in_flight,
        "fenced": asked.fenced,
        "writes": report.writes,
        "concurrency": asked.concurrency,
        **verdicts.figures(),
        **{f"reference_{name}": value for name, value in asdict(report.own).items()},
        "spread": report.spread,
        "allowed": report.allowed,
        "seconds": round(report.seconds, 1),
        "write_p50_ms": report.writes_ms[0],
        "write_p95_ms": report.writes_ms[1],
        "stall_p50_ms": report.stalls_ms[0],
        "stall_p95_ms": report.stalls_ms[1],
        "writes_per_s": round(report.writes / report.seconds, 1),
        "quiet_tokens_per_s": round(report.quiet_tokens_per_s, 1),
        "writing_tokens_per_s": round(report.writing_tokens_per_s, 1),
        "writing_over_quiet": round(report.writing_tokens_per_s / report.quiet_tokens_per_s, 4),
    }
    print(json.dumps(figures) if json_line else "\n".join(f"{name:>22}  {value}" for name, value in figures.items()))
    raise typer.Exit(int(verdicts.torn + verdicts.misnamed > 0))


if __name__ == "__main__":
    run_command(app, "grpo bench fence")
