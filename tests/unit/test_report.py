"""The report of a run: what it reads, what it draws, and that nothing in a run's folder can do harm on the page."""

from __future__ import annotations

import json
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.errors import ConfigError
from grpo_trainer.files import METRICS_FILE
from grpo_trainer.logs.times import PHASES
from grpo_trainer.report import command
from grpo_trainer.report.command import report_path, watch, write_report
from grpo_trainer.report.figures import FIGURES, OVER_TIME, TIME_SPLIT, main_plots, other_plots
from grpo_trainer.report.page import page
from grpo_trainer.report.parts import comparison, differences, strength
from grpo_trainer.report.plots import Line, Plot, nice_ticks, short, smoothed, stacked, svg, thinned
from grpo_trainer.report.read import read_run, without_secrets

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        **{"step": step, "time": 1.0, "reward/mean": step / 10, "train/loss": -0.01, "train/seconds": 2.0},
        **{"train/data_fetch_time": 0.5, "train/forward_backward_time": 1.0, "train/tokens_per_second": 100.0},
        **{"publish/version": step, "gpu/weird": step, **more},
    }


def write_run(folder: Path, rows: list[dict[str, Any]], steps: int = 10, **settings: Any) -> Path:
    (folder / "config").mkdir(parents=True)
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


# reading -----------------------------------------------------------------------------------------------------


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(1), row(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    run = read_run(folder)
    assert run.steps == 2 and run.total_steps == 10 and not run.is_done and run.name == "a"
    assert read_run(write_run(tmp_path / "b", [row(1)], steps=1)).is_done


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_run(tmp_path)
    assert error.value.field == str(tmp_path) and METRICS_FILE in error.value.got
    assert read_run(tmp_path, may_be_empty=True).steps == 0  # a run that is only starting
    with pytest.raises(ConfigError) as error:
        read_run(tmp_path / "typo", may_be_empty=True)
    assert error.value.field == str(tmp_path / "typo")


def test_checkpoints_are_folders_that_say_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(1)])
    for name in ("adapter_step_3", "environments", ".adapter_step_6.x.tmp"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        if name != "environments":
            (folder / "checkpoints" / name / "state.json").write_text("{}")
    assert read_run(folder).checkpoints == ["adapter_step_3"]


def test_a_run_that_was_started_by_hand_is_done_when_its_end_is_there(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(1), row(2)])
    (folder / "config" / "trainer.toml").unlink()
    final = folder / "checkpoints" / "adapter_final"
    final.mkdir(parents=True)
    for step, done in ((None, False), (1, False), (2, True)):
        (final / "state.json").write_text(json.dumps({"step": step, "policy_version": 1}) if step else "{")
        assert read_run(folder).is_done is done


def test_keys_to_servers_stay_secret(tmp_path: Path) -> None:
    toml = 'vllm_api_key = "hunter2"\nwandb_token = "x y"\ntokenizer_name = "m"\nmax_tokens = 5\nlr = 1e-4\n'
    assert without_secrets(toml) == (
        'vllm_api_key = "…"\nwandb_token = "…"\ntokenizer_name = "m"\nmax_tokens = 5\nlr = 1e-4\n'
    )
    assert "hunter2" not in html_of(write_run(tmp_path / "a", [row(1)], vllm_api_key="hunter2"))


def test_events_are_bad_steps_and_loud_lines(tmp_path: Path) -> None:
    rows = [row(1), row(2, **{"train/skipped": 1, "train/loss": None}), row(3, **{"rollout/dropped_stale_groups": 4})]
    folder = write_run(tmp_path / "a", rows)
    (folder / "logs").mkdir()
    (folder / "logs" / "trainer.log").write_text("INFO fine\nWARNING odd\nWARNING odd\nERROR bad\n")
    events = [(event.source, event.text) for event in read_run(folder).events]
    assert [source for source, _ in events] == ["step 2", "step 2", "step 3", "trainer", "trainer"]
    assert events[2][1].startswith("4 × groups dropped") and events[-2:] == [
        ("trainer", "WARNING odd"),
        ("trainer", "ERROR bad"),
    ]


# plots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),  # 1 / 4 = 0.25: the step is 0.5
        (0.36, 0.91, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3.0, 5.0, [-4.0, -2.0, 0.0, 2.0, 4.0, 6.0]),
        (1e-5, 4e-5, [1e-5, 2e-5, 3e-5, 4e-5]),
        (2.0, 2.0, [1.8, 1.9, 2.0, 2.1, 2.2]),
        (0.0, 0.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_ticks_are_round_and_enclose(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_numbers_for_axes() -> None:
    assert [short(value) for value in (0, 0.25, 12345, 2.5e6, 1e-5)] == ["0", "0.25", "12.3k", "2.5M", "1e-05"]
    assert short(0.125, percent=True) == "12.5%"


def test_a_line_in_its_place() -> None:
    drawn = svg(Plot("t", [Line("l", [1, 2, 3], [0.0, 0.5, 1.0])]))
    # x from 44 to 392, y from 170 (0) to 8 (1)
    assert 'points="44.0,170.0 218.0,89.0 392.0,8.0"' in drawn


def test_gaps_break_a_line_and_nothing_else() -> None:
    drawn = svg(Plot("t", [Line("l", [1, 2, 3, 4], [0.0, None, float("nan"), 1.0])]))
    assert drawn.count("<polyline") == 2 and "nan" not in drawn.lower().replace("nan</", "")
    for empty in (Plot("t", [Line("l", [1], [None])]), Plot("t", [])):
        assert svg(empty).startswith("<p") and "<svg" not in svg(empty), "a note instead of axes"


def test_areas_lie_upon_each_other() -> None:
    first, second = stacked([Line("a", [1, 2], [1.0, 2.0]), Line("b", [1, 2], [None, 3.0])])
    assert list(first.ys) == [1.0, 2.0] and list(second.ys) == [1.0, 5.0]
    assert svg(Plot("t", [first, second], stacked=True)).count("<polygon") == 2


def test_long_runs_are_thinned_and_smoothed() -> None:
    line = thinned(Line("l", list(range(1000)), [float(x) for x in range(1000)]))
    assert len(line.xs) == 334 and line.ys[0] == line.xs[0] == 1.0  # of 0, 1 and 2
    assert smoothed([0.0, 3.0, None, 6.0]) == [1.5, 1.5, 4.5, 6.0]  # each with one on either side
    assert 'thin"' in svg(Plot("t", [Line("l", list(range(100)), [1.0] * 100)]))


def test_figures_show_what_was_measured_and_the_rest_apart(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [row(1), row(2)]))
    titles = [plot.title for plot in main_plots([run])]
    assert titles == ["Reward", OVER_TIME, "Loss", "Throughput", TIME_SPLIT]
    assert [plot.title for plot in other_plots([run])] == ["gpu/weird"]
    over_time = main_plots([run])[1].lines[0]
    assert list(over_time.xs) == [2.0, 4.0] and list(over_time.ys) == [0.1, 0.2]
    split = {PHASES.get(line.name): list(line.ys) for line in main_plots([run])[-1].lines}
    assert split == {
        "train/data_fetch_time": [0.5, 0.5],
        "train/forward_backward_time": [1.0, 1.0],
        None: [0.5, 0.5],
    }


def test_what_is_measured_now_and_then_is_one_line(tmp_path: Path) -> None:
    key = "eval/gsm8k/strict"
    rows = [row(1, **{key: 0.1, f"{key}_low": 0.05}), row(2), row(3, **{key: 0.3}), row(4, **{"train/loss": None})]
    run = read_run(write_run(tmp_path / "a", rows))
    plots = {plot.title: plot for plot in main_plots([run])}
    evaluation, bound = plots["Evaluation: gsm8k/strict"].lines
    assert (bound.name, list(bound.ys)) == ("at least", [0.05])
    assert list(evaluation.xs) == [1.0, 3.0] and list(evaluation.ys) == [0.1, 0.3]
    assert [plot.title for plot in other_plots([run])] == ["gpu/weird"]
    assert list(plots["Loss"].lines[0].ys) == [-0.01, -0.01, -0.01, None], "not finite is a gap"


def test_several_environments_have_a_line_each(tmp_path: Path) -> None:
    rows = [row(1, **{"reward/env_0": 0.1, "reward/env_1": 0.3, "reward/env_0_std": 0.5})]
    reward = main_plots([read_run(write_run(tmp_path / "a", rows))])[0]
    assert [line.name for line in reward.lines] == ["mean", "environment 0", "environment 1"]
    alone = main_plots([read_run(write_run(tmp_path / "b", [row(1, **{"reward/env_0": 0.1})]))])[0]
    assert [line.name for line in alone.lines] == ["mean"]


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
    (folder / "logs").mkdir()
    (folder / "logs" / "api.log").write_text(f"ERROR {EVIL}\n")
    html = html_of(folder)
    reader = References()
    reader.feed(html)
    assert reader.found == ["data:,"], "the icon that a browser would ask for"
    assert reader.handlers == []
    assert "url(" not in html and "@import" not in html
    assert html.count("<script") == 2 and "<img" not in html, "the data and the page's own"
    assert "default-src 'none'" in html


def test_samples_show_prompt_answer_score_advantage_and_ratios(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(1)])
    (folder / "samples.jsonl").write_text(json.dumps(a_sample()) + "\n")
    html = html_of(folder)
    for said in ("1+1=", "reward <b>1</b>", "+0.50", "group 2", "v0", "environment 0", "7 more"):
        assert said in html, said
    assert '<span class="p4" title="ratio 2">2</span><span class="u">!</span>' in html
    assert "--log-samples" in html_of(write_run(tmp_path / "b", [row(1)])), "it says how to get some"


def test_the_colour_of_a_ratio() -> None:
    # ln 2 = 0.69 of 0.7: the strongest; ln 1.2 = 0.18: 0.26 * 4 = 1; ln 1.05 = 0.05: none
    found = [strength(ratio) for ratio in (2.0, 0.5, 1.2, 1 / 1.2, 1.05, 1.0, 0.0, 100.0)]
    assert found == ["p4", "m4", "p1", "m1", "", "", "m4", "p4"]


def test_runs_beside_each_other(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [row(1), row(2, **{"alignment/kl_reference": 0.1})], lr=1e-4, seed=0, save_path="x")
    b = write_run(tmp_path / "b", [row(1, **{"alignment/kl_rollout": 0.1})], lr=5e-4, seed=0, save_path="y")
    runs = [read_run(a), read_run(b)]
    assert [line.name for line in main_plots(runs)[0].lines] == ["a", "b"]
    kl = next(plot for plot in main_plots(runs) if plot.title == "KL")
    (of_rollout,) = [figure.keys["alignment/kl_rollout"] for figure in FIGURES if figure.title == "KL"]
    assert [(line.name, line.dash) for line in kl.lines] == [("a", 0), (f"b, {of_rollout}", 1)]
    assert differences(runs).count("<tr>") == 2 and "0.0005" in differences(runs)  # the head, and lr
    assert comparison(runs).count("<tr>") == 3
    html = html_of(a, b)
    assert differences(runs) in html and html.count(TIME_SPLIT) >= 2


def test_where_it_is_written(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", [row(1)]), write_run(tmp_path / "b", [row(1)])
    assert report_path([a], None) == a / "report.html" and report_path([a, b], None) == a / "comparison.html"
    assert report_path([a], tmp_path / "x.html") == tmp_path / "x.html"
    assert not write_report([a], a / "report.html")
    assert (a / "report.html").read_text().startswith("<!doctype html>")


def test_a_long_run_is_a_small_page(tmp_path: Path) -> None:
    short_run, long_run = (write_run(tmp_path / str(n), [row(step + 1) for step in range(n)]) for n in (400, 8000))
    assert len(html_of(long_run)) < 1.5 * len(html_of(short_run))


def test_watching_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "report.html"
    seen: list[bool] = []

    def pause(seconds: float) -> None:
        assert seconds == command.WATCH_SECONDS
        seen.append('http-equiv="refresh"' in path.read_text())
        if len(seen) == 1:
            (folder / "config").mkdir()
            write = (folder / "config" / "trainer.toml").write_text
            write("training_steps = 2\n")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row(n + 1)) + "\n" for n in range(len(seen))))

    watch([folder], path, pause)
    assert seen == [True, True], "before the first step, and after it"
    assert 'http-equiv="refresh"' not in path.read_text() and "Reward" in path.read_text()


def test_watching_may_be_stopped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [row(1)])

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    watch([folder], folder / "report.html", interrupt)
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()
