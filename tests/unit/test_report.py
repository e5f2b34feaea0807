"""The report of a run: what it reads, what it draws, and that nothing in a run's folder can do harm on the page."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from grpo_common.locks import hold, is_held
from grpo_common.pages.document import plotting
from grpo_trainer.cli import app
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import LOCK_FILE, METRICS_FILE
from grpo_trainer.metrics.rows import LAST_BYTES
from grpo_trainer.report import page as page_module
from grpo_trainer.report import runs
from grpo_trainer.report.figures import (
    EVALUATION,
    FIGURES,
    NOT_TRAINED,
    OTHER,
    PHASES,
    SAME,
    TIME_SPLIT,
    UNKNOWN,
    Line,
    Plot,
    all_plots,
    character,
    evenly,
    page_data,
    sample_data,
    thinned,
)
from grpo_trainer.report.page import SCRIPTS, page, report_path, watch, write_report
from grpo_trainer.report.read import Run, read_run
from grpo_trainer.report.runs import as_json, list_runs
from grpo_trainer.saving.manifest import Progress, seal
from tests.unit.factories import refusing

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        **{"step": step, "time": 1.0, "reward/mean": step / 10, "train/loss": -0.01, "train/seconds": 2.0},
        **{"train/data_fetch_time": 0.5, "train/forward_backward_time": 1.0, "train/tokens_per_second": 100.0},
        **{"publish/version": step, "gpu/weird": step, **more},
    }


def write_run(folder: Path, rows: list[dict[str, Any]], steps: int = 10, **settings: Any) -> Path:
    for name in ("config", "logs"):
        (folder / name).mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"training_steps": steps, **settings}.items()]
    (folder / "config" / "trainer.toml").write_text("\n".join(lines))
    return folder


def a_sample(**fields: Any) -> dict[str, Any]:
    return {
        **{"step": 1, "version": 0, "environment": 0, "group": 2, "reward": 1.0, "advantage": 0.5, "cut": 7},
        **{"prompt": "1+1=", "pieces": ["2", "!"], "ratios": [2.0, None], "trained": [True, False]},
        **fields,
    }


def html_of(*folders: Path, refresh_seconds: int = 0) -> str:
    return page([read_run(folder) for folder in folders], made=datetime(2026, 1, 2), refresh_seconds=refresh_seconds)


def test_text_of_others_does_not_turn_the_direction_of_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(1)], model_name="m\u202eevil")
    (folder / "samples.jsonl").write_text(json.dumps(a_sample(prompt="1\u202e+1", pieces=["2\u2067", "\u05d0"])) + "\n")
    html = html_of(folder)
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", html) and "\u05d0" in html
    assert "m\\u202eevil" in html
    (data,) = re.findall(r'id="data">(.*?)</script>', html)
    (sample,) = json.loads(data)["samples"][0]["samples"]
    assert sample["prompt"] == "1\\u202e+1" and "unicode-bidi: isolate" in html


# reading -----------------------------------------------------------------------------------------------------


def test_report_of_no_run(tmp_path: Path) -> None:
    with refusing(ConfigError, str(tmp_path), words=[METRICS_FILE]):
        read_run(tmp_path)
    assert read_run(tmp_path, may_be_empty=True).steps == 0  # a run that is only starting
    with refusing(ConfigError, str(tmp_path / "typo")):
        read_run(tmp_path / "typo", may_be_empty=True)

    with refusing(ConfigError, "FOLDER", got=str(tmp_path / "typo")):
        list_runs(tmp_path / "typo")


def test_report_checkpoints(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(1)])
    for name in ("adapter_step_3", "environments", ".adapter_step_6.x.tmp"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        if name != "environments":
            (folder / "checkpoints" / name / "state.json").write_text("{}")
    assert read_run(folder).checkpoints == ["adapter_step_3"]

    folder = write_run(tmp_path / "b", [row(1), row(2)])
    (folder / "config" / "trainer.toml").unlink()
    final = folder / "checkpoints" / "adapter_final"
    final.mkdir(parents=True)
    (final / "state.json").write_text("{")
    assert not read_run(folder).is_done
    for step, done in ((1, False), (2, True)):
        seal(final, Progress(step, 1))
        assert read_run(folder).is_done is done


def test_secrets_of_settings_are_hidden_in_logs_and_figures_are_not(tmp_path: Path) -> None:
    """Those of settings in whatever form: see test_redaction.py."""
    folder = write_run(tmp_path / "a", [row(1)])
    (folder / "config" / "env-mine.toml").write_text(
        """
[env]
words = ["--hf-token", "hunter5", "--server.extra-args=--max-num-batched-tokens=8192"]
stop_token_ids = [1, 2]
[env.judge.openai]
api_key = [
  "hunter7",
]
"""
    )
    (folder / "logs" / "env-mine.log").write_text(
        "WARNING refused: hunter7\nWARNING POST http://h/v1?token=hunter8\nERROR {'api_key': 'hunter9'}\n"
    )
    html = html_of(folder)
    assert "hunter" not in html
    for shown in ("--server.extra-args=--max-num-batched-tokens=8192", "stop_token_ids", "POST http://h/v1?token=…"):
        assert shown in html


def test_events_are_bad_steps_and_loud_lines(tmp_path: Path) -> None:
    rows = [row(1), row(2, **{"train/skipped": 1, "train/loss": None}), row(3, **{"rollout/dropped_stale_groups": 4})]
    rows += [row(4, **{"rollout/dropped_stale_groups": 1}), row(5), row(6, **{"rollout/dropped_stale_groups": 1})]
    folder = write_run(tmp_path / "a", rows)
    (folder / "logs" / "trainer.log").write_text("INFO fine\nWARNING odd\nWARNING odd\nERROR bad\n")
    events = [(event.source, event.text) for event in read_run(folder).events]
    assert [source for source, _ in events[:-2]] == ["step 2", "step 2", "steps 3 to 4", "step 6"]
    assert [text.split(" × ")[0] for _, text in events[:-2]] == ["1", "1", "5", "1"]  # 4 groups at step 3, 1 at step 4
    assert events[-2:] == [("trainer", "WARNING odd"), ("trainer", "ERROR bad")]


def test_warnings_of_a_server_that_starts_are_folded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(1)])
    start = "$ python -m vllm_server\n(X pid=1) WARNING 1 odd\n(X pid=1) ERROR 1 bad\n"
    ready, later = "INFO: Application startup complete.\n", "(X pid=1) WARNING 2 late\n"
    log = folder / "logs" / "server.log"
    log.write_text(start + ready + later)
    assert [event.routine for event in read_run(folder).events] == [True, False, False]
    shown, folded = html_of(folder).split("<h2>Events</h2>")[1].split("<details>", 1)
    assert "late" in shown and "bad" in shown and "odd" in folded
    log.write_text(start + ready + start.replace("pid=1) WARNING 1", "pid=7) WARNING 5"))
    assert [event.routine for event in read_run(folder).events] == [True, False], "a second start says the same"
    log.write_text(start.split("\n", 1)[1] + ready + later)
    assert [event.routine for event in read_run(folder).events] == [True, False, False], "started by hand"
    log.write_text(start + ready + "INFO [shutdown] triggered\nERROR 3 gone\n" + start + ready + later)
    found = {event.text.split()[-1]: event.routine for event in read_run(folder).events}
    assert found == {"odd": True, "bad": False, "gone": True, "late": False}, "a server that ends"
    log.write_text(start)
    assert [event.routine for event in read_run(folder).events] == [False, False], "it never came to its end"


# plots -------------------------------------------------------------------------------------------------------


def plots_of(*runs: Run) -> dict[str, Plot]:
    return {plot.title: plot for plot in all_plots(runs)}


def test_report_figures(tmp_path: Path) -> None:
    line = thinned(Line("l", list(range(1000)), [float(x) for x in range(1000)]))
    assert len(line.xs) == 334 and line.ys[0] == line.xs[0] == 1.0  # of 0, 1 and 2
    folder = write_run(tmp_path / "a", [row(n) for n in range(1000)])
    data = page_data([read_run(folder)] * 10)
    assert {len(data["places"][line["xs"]]) for plot in data["plots"] for line in plot["lines"]} == {100}

    run = read_run(write_run(tmp_path / "b", [row(1), row(2)]))
    plots = all_plots([run])
    assert [plot.title for plot in plots] == ["Reward", "Loss", "Throughput", TIME_SPLIT, "gpu/weird"]
    assert [plot.title for plot in plots if plot.section == OTHER] == ["gpu/weird"]
    split = {PHASES.get(line.name): list(line.ys) for line in plots_of(run)[TIME_SPLIT].lines}
    assert split == {"train/data_fetch_time": [0.5, 0.5], "train/forward_backward_time": [1.0, 1.0], None: [0.5, 0.5]}


def test_an_evaluation_stands_at_its_own_step(tmp_path: Path) -> None:
    key = "eval/gsm8k_0/strict"
    came = {key: 0.1, f"{key}_low": 0.05, "eval/gsm8k_0/step": 0, "eval/gsm8k_0/samples": 8}
    rows = [row(1), row(3, **came), row(5, **{key: 0.3, "eval/gsm8k_0/step": 4}), row(6, **{"train/loss": None})]
    run = read_run(write_run(tmp_path / "a", rows))
    evaluation, bound = plots_of(run)["gsm8k/strict"].lines
    assert (bound.name, list(bound.xs), list(bound.ys)) == ("at least", [0.0], [0.05])
    assert list(evaluation.xs) == [0.0, 4.0] and list(evaluation.ys) == [0.1, 0.3]
    assert evaluation.marked and evaluation.band is None, "there is no upper bound"
    assert [plot.title for plot in all_plots([run]) if plot.section == EVALUATION] == ["gsm8k/strict"]
    assert list(plots_of(run)["Loss"].lines[0].ys) == [-0.01, -0.01, -0.01, None], "not finite is a gap"
    assert not [title for title in plots_of(run) if title.endswith("/step")]


def test_json_has_figures_and_verdict(tmp_path: Path) -> None:
    key = "eval/g_0/right"
    rows = [row(step, **{"train/grad_norm": 1.0 if step <= 2 else 20.0}) for step in range(1, 13)]
    rows[3] |= {key: 0.75, "eval/g_0/step": 3}
    rows[9] |= {key: 0.5, "eval/g_0/step": 9}
    rows[11] |= {key: None, "eval/g_0/step": 11}  # not finite
    sick = write_run(tmp_path / "a", rows, steps=12)
    well = write_run(tmp_path / "b", [row(1)])
    done = CliRunner().invoke(app, ["report", str(sick), str(well), "--json"])
    first, second = json.loads(done.stdout)
    assert (first["name"], first["folder"], first["steps"], first["total_steps"]) == ("a", str(sick), 12, 12)
    assert first["done"] and not second["done"]
    assert (first["verdict"], second["verdict"]) == ("not healthy", None)
    (left,) = first["unhealthy"]
    assert (left["figure"], left["first_step"], left["steps"]) == ("train/grad_norm", 4, 9)
    # reward/mean is step / 10: means of 0.1 to 0.5 and of 0.8 to 1.2
    assert first["reward"] == pytest.approx({"first": 0.3, "last": 1.0, "best": 1.2, "best_step": 12})
    assert first["evaluations"] == {"g/right": {"last": 0.5, "step": 9, "best": 0.75, "best_step": 3}}
    assert (first["tokens_per_second"], first["seconds"], first["version"]) == (100.0, 24.0, 12)
    assert first["last"]["train/grad_norm"] == 20.0 and second["unhealthy"] == []
    assert not (sick / "report.html").exists()
    refused = CliRunner().invoke(app, ["report", str(sick), "--json", "--watch"]).exception
    assert isinstance(refused, ConfigError) and refused.field == "--json"


# environments ------------------------------------------------------------------------------------------------


def test_environments_of_a_resumed_run_have_one_curve_each_under_their_names(tmp_path: Path) -> None:
    rows = [row(n, **{"reward/env_0": 0.1 * n, "reward/env_1": 0.3, "reward/env_0_std": 0.5}) for n in (1, 2, 3, 4)]
    rows[2]["train/resumed"] = 1.0
    folder = write_run(tmp_path / "a", rows)
    registered = [(0, "sums_0"), (1, "words_0"), (1, "words_0"), (0, "sums_0")]  # in another order, the second time
    lines = [f"INFO environment {number} registered: {name}, groups of 8\n" for number, name in registered]
    (folder / "logs" / "api.log").write_text("".join(lines))
    own = [{"step": n, "sums_0/format": n / 10} for n in (1, 2, 3, 2, 3, 4)]  # 3 and 2 are taken twice
    (folder / "logs" / "env-sums.metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in own))
    (folder / "samples.jsonl").write_text(json.dumps(a_sample(environment=1)) + "\n")
    run = read_run(folder)
    reward = {line.name: list(line.ys) for line in plots_of(run)["Reward"].lines}
    assert reward["sums"] == pytest.approx([0.1, 0.2, 0.3, 0.4]) and reward["words"] == [0.3] * 4
    assert run.resumed == [3] and page_data([run])["runs"][0]["resumed"] == [3]
    assert list(plots_of(run)["sums/format"].lines[0].ys) == [0.1, 0.2, 0.3, 0.4]
    assert run.samples[0]["environment"] == "words"
    assert not [title for title in plots_of(run) if "resumed" in title]


# samples -----------------------------------------------------------------------------------------------------


def test_report_samples() -> None:
    # ln 2 = 0.693 / 0.04 = 17; ln 1.05 = 0.049 / 0.04 = 1
    found = [ord(character(ratio, trained=True)) - SAME for ratio in (1.0, 2.0, 0.5, 1.05, 0.0, 1e9)]
    assert found == [0, 17, -17, 1, -28, 28]
    assert (character(None, trained=True), character(2.0, trained=False)) == (UNKNOWN, NOT_TRAINED)
    assert not {UNKNOWN, NOT_TRAINED} & {chr(SAME + units) for units in range(-28, 29)}

    assert evenly([1, 2, 3, 4, 5], 3) == [1, 3, 5] and evenly([1, 2, 3], 1) == [3]
    rows = [a_sample(step=step, group=group) for step in range(1, 101) for group in (0, 1)]
    assert len(sample_data(rows, 0)["samples"]) == 200
    few = sample_data(rows, 0, most=4000)
    steps = [sample["step"] for sample in few["samples"]]
    assert few["of"] == 200 and (steps[0], steps[-1]) == (1, 100)
    assert all(steps.count(step) == 2 for step in steps) and len(json.dumps(few["samples"])) < 4500


# the page ----------------------------------------------------------------------------------------------------


class References(HTMLParser):
    """What a page would ask for, and the scripts in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str | None] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_no_external_request_and_no_foreign_script(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(1, **{EVIL: 1.0})], wandb_project=EVIL)
    (folder / "samples.jsonl").write_text(json.dumps(a_sample(prompt=EVIL, pieces=[EVIL, EVIL])) + "\n")
    (folder / "logs" / "api.log").write_text(f"ERROR {EVIL}\n")
    html = html_of(folder)
    reader = References()
    reader.feed(html)
    assert reader.found == ["data:,"], "the icon that a browser would ask for"
    assert reader.handlers == []
    assert "url(" not in html and "@import" not in html
    own = len(plotting()[1]) + len(SCRIPTS)
    assert html.count("<script") == 1 + own and "<img" not in html, "the data and the page's own"
    assert "default-src 'none'" in html and "unsafe" not in html and html.count("'sha256-") == 1 + own


def test_runs_beside_each_other(tmp_path: Path) -> None:
    a = write_run(
        tmp_path / "a",
        [row(1), row(2, **{"alignment/kl_reference": 0.1})],
        lr=1e-4,
        seed=0,
        save_path="x",
        vllm_config_path="p",
    )
    b = write_run(tmp_path / "b", [row(1, **{"alignment/kl_rollout": 0.1})], lr=5e-4, seed=0, save_path="y")
    for folder, size in ((a, 8), (b, 16)):
        settings = f'[env]\ngroup_size = {size}\nmetrics_path = "{folder}"\nrollout_api_key = "{folder}"\n'
        settings += f'[data]\npath = "{size}.jsonl"\n[[rewards]]\nfunction = "my.py:f"\nweight = {size}.0\n'
        (folder / "config" / "env-sums.toml").write_text(settings)
    runs = [read_run(a), read_run(b)]
    assert [(line.name, line.run, line.colour) for line in all_plots(runs)[0].lines] == [("mean", 0, 0), ("mean", 1, 1)]
    kl = plots_of(*runs)["KL"]
    of_reference, of_rollout = next(figure.keys.values() for figure in FIGURES if figure.title == "KL")
    assert [(line.name, line.run, line.dash) for line in kl.lines] == [(of_reference, 0, 0), (of_rollout, 1, 1)]
    names = ["lr", "sums.data.path", "sums.group_size", "sums.rewards"]
    html = html_of(a, b)
    table = html.split("<h2>Options that differ</h2>")[1].split("</table>")[0]
    assert re.findall("<tr><td>(.+?)</td>", table) == names and "0.0005" in table
    assert html.split("</table>")[0].count("<tr>") == 3 and html.count(TIME_SPLIT) >= 2


def test_the_servers_options_of_two_versions_are_compared_under_one_name(tmp_path: Path) -> None:
    old = {"vllm_host": "h", "vllm_port": 9001, "vllm_also": ["h:1"], "vllm_gpus": "0", "vllm_roster": "r"}
    a = write_run(tmp_path / "a", [row(1)], **old, vllm_api_key="a", vllm_dtype="float16", max_model_len=64)
    server = '\n[server]\nhost = "i"\nport = 9002\nroster = "q"\napi_key = "b"\ndtype = "float16"\nmax_model_len = 32\n'
    b = write_run(tmp_path / "b", [row(1)])
    with (b / "config" / "trainer.toml").open("a") as file:
        file.write(server)
    assert read_run(a).settings == {"training_steps": 10, "server.dtype": "float16", "server.max_model_len": 64}
    assert read_run(b).settings == {"training_steps": 10, "server.dtype": "float16", "server.max_model_len": 32}


def test_where_it_is_written(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", [row(1)]), write_run(tmp_path / "b", [row(1)])
    assert report_path([a], None) == a / "report.html" and report_path([a, b], None) == a / "comparison-a-b.html"
    long = [report_path([a, *(tmp_path / f"{'ж' * 100}{number}" for number in (1, last))], None) for last in (2, 3)]
    assert long[0] != long[1] and all(len(path.name.encode()) <= 255 for path in long)
    assert report_path([a], tmp_path / "x.html") == tmp_path / "x.html"
    assert not write_report([a], a / "report.html")
    assert (a / "report.html").read_text().startswith("<!doctype html>")


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "report.html"
    seen: list[bool] = []

    def pause(seconds: float) -> None:
        assert seconds == page_module.WATCH_SECONDS
        seen.append('http-equiv="refresh"' in path.read_text())
        if len(seen) == 1:
            (folder / "config").mkdir()
            write = (folder / "config" / "trainer.toml").write_text
            write("training_steps = 2\n")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row(n + 1)) + "\n" for n in range(len(seen))))

    monkeypatch.setattr(page_module.time, "sleep", pause)
    watch([folder], path)
    assert seen == [True, True], "before the first step, and after it"
    assert 'http-equiv="refresh"' not in path.read_text() and "Reward" in path.read_text()


# grpo runs -----------------------------------------------------------------------------------------------------------


def test_runs_are_found_two_levels_down_and_the_newest_comes_first(tmp_path: Path) -> None:
    for age, name in enumerate(("sums", "monday/words", "too/deep/down")):
        folder = write_run(tmp_path / name, [row(1)])
        os.utime(folder / "metrics.jsonl", (1000 - age, 1000 - age))
    (tmp_path / "latest").symlink_to(tmp_path / "sums")
    (tmp_path / "empty").mkdir()
    assert [run.folder for run in list_runs(tmp_path)] == [str(tmp_path / "sums"), str(tmp_path / "monday/words")]
    assert [run.folder for run in list_runs(tmp_path / "sums")] == [str(tmp_path / "sums")]


def test_runs_what_a_run_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(n) for n in range(1, 8)], weight_bridge_mode="lora_only", model_name="m/n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')
    (run,) = list_runs(tmp_path)
    # the reward of step n is n / 10; the last five are 3 to 7
    assert (run.mode, run.model, run.steps, run.total_steps, run.reward) == ("lora_only", "m/n", 7, 10, 0.5)
    assert json.loads(as_json([run]))[0]["state"] == "stopped"
    (folder / "config" / "trainer.toml").unlink()
    assert list_runs(tmp_path)[0].mode is None


def test_only_the_end_of_a_long_run_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(n) for n in range(1, 2000)], steps=1999)
    assert (folder / "metrics.jsonl").stat().st_size > 2 * LAST_BYTES
    (run,) = list_runs(tmp_path)
    assert (run.steps, run.reward, run.state) == (1999, 199.7, "done")  # 1997 / 10 is the middle of the last five


def test_a_lock_waits_for_one_who_looks(tmp_path: Path) -> None:
    looking = os.open(tmp_path / "lock", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.01, os.close, (looking,)).start()
    os.close(hold(tmp_path / "lock"))


@pytest.mark.parametrize("place", [".", "checkpoints"])
def test_a_run_whose_lock_is_held_is_running(tmp_path: Path, place: str) -> None:
    folder = write_run(tmp_path / "a", [])
    (folder / place).mkdir(exist_ok=True)
    lock = folder / place / LOCK_FILE
    assert not is_held(lock) and list_runs(tmp_path)[0].state == "stopped"
    handle = hold(lock)
    assert is_held(lock)
    assert [(run.state, run.steps, run.reward) for run in list_runs(tmp_path)] == [("running", 0, None)]
    os.close(handle)
    assert not is_held(lock), "looking does not hold it"


def test_another_users_run_is_known_by_what_everybody_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "a", [row(1)])
    monkeypatch.setattr(os, "access", lambda path, _: "config" not in path.parts)  # modes keep nothing from root
    monkeypatch.setattr(runs, "is_held", Mock(side_effect=PermissionError))
    (run,) = list_runs(tmp_path)
    assert (run.mode, run.steps, run.reward, run.state) == (None, 1, 0.1, "unknown")
    assert (read_run(folder).configs, read_run(folder).steps) == ({}, 1)


def test_the_command_writes_utf8_whatever_the_locale(tmp_path: Path) -> None:
    write_run(tmp_path / "größe→", [row(1)])
    # The locale C is on every machine; in it Python would choose UTF-8 by itself.
    other = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "grpo_trainer", "runs", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | other, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    shown = ["größe→", "none", "–", "1/10", "0.100", "stopped"]
    assert done.stdout.decode().splitlines()[1].split() == shown
