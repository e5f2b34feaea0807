"""What `grpo doctor` prints: a table for people, one JSON object for machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_trainer.doctor.before_start import Finding
from grpo_trainer.memory import GB, MemoryPlan, device_name

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]", "skip": "[dim]skip[/]"}


def print_findings(findings: Sequence[Finding], plan: MemoryPlan | None, console: Console) -> None:
    """The table, the memory plan, and what to mend."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(MARKS[finding.status], escape(finding.name), escape(finding.got))
    console.print(table)
    if plan is not None:
        console.print(memory_table(plan))
    wrong = [finding for finding in findings if finding.status in ("warn", "fail")]
    for finding in wrong:
        console.print(f"\n{MARKS[finding.status]} {escape(finding.name)}: {escape(finding.got)}", soft_wrap=True)
        for word, text in (("wanted", finding.wanted), ("fix", finding.fix)):
            if text and text not in finding.got:
                console.print(f"  {word}: {text}", markup=False, highlight=False, soft_wrap=True)
    verdict = "[green]nothing stands in the way[/]"
    if fails(wrong):
        verdict = f"[bold red]{sum(finding.status == 'fail' for finding in wrong)} would fail[/]"
    elif wrong:
        verdict = f"[yellow]nothing fails for certain; warnings: {escape(', '.join(each.name for each in wrong))}[/]"
    console.print(f"\n{verdict}")


def memory_table(plan: MemoryPlan) -> Table:
    """What lies where, in GB."""
    table = Table(title="planned memory, GB", title_justify="left", box=None, pad_edge=False, caption_justify="left")
    devices = sorted({row.device for row in plan.rows})
    table.add_column("")
    for device in devices:
        table.add_column(device_name(plan.devices, device), justify="right")
    for owner, what in dict.fromkeys((row.owner, row.what) for row in plan.rows):
        here = {row.device: row.nbytes for row in plan.rows if (row.owner, row.what) == (owner, what)}
        table.add_row(f"{owner}: {what}", *(f"{here[d] / GB:.2f}" if d in here else "" for d in devices))
    table.add_row("in all", *(f"{plan.used(device) / GB:.2f}" for device in devices), style="bold")
    table.add_row("there is", *(f"{plan.devices.total / GB:.2f}" for _ in devices))
    count, layers = plan.recomputed
    table.caption = (
        f"key-value cache for {plan.kv_tokens:,} tokens; activations are an estimate, "
        f"{count} of {layers} layers recomputed at the most"
    )
    return table


def as_json(findings: Sequence[Finding], plan: MemoryPlan | None) -> str:
    """One object: `{"ok": bool, "findings": [...], "memory": {...} or null}`; sizes in bytes."""
    memory = plan and {
        "rows": [asdict(row) for row in plan.rows],
        "total": plan.devices.total,
        "devices": plan.devices.count,
        "kind": plan.devices.kind,
        "kv_tokens": plan.kv_tokens,
        "recomputed_layers": plan.recomputed[0],
    }
    return json.dumps({"ok": not fails(findings), "findings": [asdict(each) for each in findings], "memory": memory})


def fails(findings: Iterable[Finding]) -> bool:
    """Return whether a run would fail; a warning and a skipped check are no failure."""
    return any(finding.status == "fail" for finding in findings)
