"""Pages and configurations that are shipped say what the code says."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import typer
from click import Command
from pydantic import BaseModel
from typer.main import get_command
from typer.testing import CliRunner

from environments.agent.env import AgentConfig
from environments.api.settings import Settings as ApiSettings
from environments.arithmetic import ArithmeticConfig
from environments.config import ServerConfig
from environments.data_config import DataConfig
from environments.dataset.env import DatasetConfig
from environments.from_verifiers.config import VerifiersConfig
from environments.gsm8k import Gsm8kConfig
from environments.multi_turn import MultiTurnConfig
from environments.word_problems import WordProblemsConfig
from grpo_trainer.bench.__main__ import app as bench
from grpo_trainer.bench.models import SHAPES
from grpo_trainer.cli import app
from grpo_trainer.config.options import build, options_of
from grpo_trainer.config.processes import RunConfig, RunSection
from grpo_trainer.config.rules import Hardware, check, unusual_lr
from grpo_trainer.config.run import build_run, read_toml
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.doctor.checks import Case, sequence_length, servers_gpus
from grpo_trainer.launch.plan import plan_run
from grpo_trainer.machine import Gpu, Machine
from grpo_trainer.memory import Devices, Setup
from grpo_trainer.model.shape import ModelShape
from tests.processes import load_script
from tests.unit.factories import values_of

ROOT = Path(__file__).parents[2]
COUNTED = [
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
"""Pages of which there may be fourteen, of 30,000 words in all."""
EXAMPLES = sorted((ROOT / "configs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *COUNTED, *EXAMPLES]
DEMO_PARAMETERS = 760_000
FLAGS_ELSEWHERE = {
    *("--min-lr", "--lr-schedul", "--some-flag", "--generation-config"),  # of examples, and vLLM's own
    *("--nproc-per-node", "--install-completion", "--allowed-origins", "--trust-remote-code"),  # of other programs
}
OF_EXAMPLES = ("environments/days.py",)
"""Files that an example of CONTRIBUTING adds."""
ENVIRONMENTS = (
    AgentConfig,
    ArithmeticConfig,
    DatasetConfig,
    Gsm8kConfig,
    MultiTurnConfig,
    VerifiersConfig,
    WordProblemsConfig,
)


def test_tests_that_pages_name_are_there() -> None:
    names = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    there = " ".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert names and not [name for name in names if f"def {name}(" not in there]


def test_pages_stay_few_and_short() -> None:
    words = {page.name: len(page.read_text().split()) for page in COUNTED}
    assert len(words) == len(COUNTED) <= 14 and sum(words.values()) <= 30_000, words
    assert (ROOT / "AGENTS.md").read_text().count("\n") <= 120
    assert [page.name for page in EXAMPLES if page.read_text().count("\n") > 60] == []
    assert [page.stem for page in EXAMPLES] == [path.stem for path in CONFIGS], "a page for each example"
    assert 0 < len(CONFIGS) <= 9


def test_the_page_of_options_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert load_script("options_table").insert(page) == page, "run: python scripts/options_table.py --write"
    assert "`--lora-target-modules`" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert not [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != 4], "a bar in a text ends its cell"


def test_every_page_is_found_from_the_readme() -> None:
    """Directly, or by the index of the pages."""
    linked = {
        (page.parent / target).resolve()
        for page in (ROOT / "README.md", ROOT / "docs" / "README.md")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    }
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if page.resolve() not in linked]


def shell_lines(text: str) -> list[list[str]]:
    """The words of each line of a page's shell blocks."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
    return [words for line in blocks.splitlines() if (words := shlex.split(line, comments=True))]


def commands(text: str) -> list[list[str]]:
    """The arguments of each `grpo run` and `grpo doctor` of a page's shell blocks.

    Commands with a placeholder, on an earlier run, for a job script or another machine are left out.
    """
    lines = [words[2:] for words in shell_lines(text) if words[0] == "grpo" and words[1] in ("run", "doctor")]
    placeholder = r"[…$]|\b[A-Z]{3,}\b|--(resume|config) runs/|--slurm|--for-gpus"
    return [words for words in lines if {*words} - {"--json"} and not re.search(placeholder, " ".join(words))]


def commands_of(program: typer.Typer) -> list[Command]:
    return [*get_command(program).commands.values()]  # type: ignore[attr-defined]


@cache
def known_flags() -> set[str]:
    """Those of options, of environments' settings, and all that stand in sources of packages and scripts."""
    roots = {getattr(command, "root", RunSection) for each in (app, bench) for command in commands_of(each)}
    known = {flag for root in roots for option in options_of(root) for flag in (*option.flags, *option.former)}
    settings = {"env": ENVIRONMENTS, "openai": (ServerConfig,), "data": (DataConfig,)}
    known |= {
        flag
        for each in (app, bench)
        for command in commands_of(each)
        for option in command.params
        for flag in option.opts
    }
    known |= {f"--{name}.{key}" for name, all_of in settings.items() for each in all_of for key in each.model_fields}
    known |= {f"--{each.name.replace('_', '-').removesuffix('s')}" for each in fields(ApiSettings)}
    folders = ("grpo_common", "grpo_trainer", "vllm_server", "environments", "scripts")
    sources = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".sh")]
    known |= {"--distributed-executor-backend", "--micro", "--no-scoring"}  # vLLM's, and names that typer makes
    return known | {flag for path in sources for flag in re.findall(r"--[a-z][a-z-]+", path.read_text())}


def test_commands_and_their_flags_are_there() -> None:
    """Also those with placeholders, and those of other commands than `grpo run`."""
    here, known = {*get_command(app).commands}, known_flags()  # type: ignore[attr-defined]
    wrong = []
    for page in PAGES:
        for words in shell_lines(page.read_text()):
            while words and re.match(r"[A-Z_0-9]+=", words[0]):
                words = words[1:]
            flags = [word.partition("=")[0] for word in words if re.match("--[a-z]", word)]
            ours = words[:1] == ["grpo"] or (words[:1] in (["bash"], ["python"]) and words[1].startswith("scripts/"))
            if words[:1] == ["grpo"] and not words[1].startswith("-") and words[1] not in here:
                wrong.append((page.name, words[1]))
            if ours and words[0] != "grpo" and not (ROOT / words[1]).exists():
                wrong.append((page.name, words[1]))
            wrong += [(page.name, flag) for flag in flags if ours and flag not in known]
    assert not wrong


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page.read_text())], ids=lambda page: page.name)
def test_commands_of_a_page_are_accepted(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but starting: options, configuration files, what goes together, and a learning rate that suits the mode."""
    accepted: list[RunConfig] = []
    monkeypatch.setattr("grpo_trainer.run.run", lambda config, console: accepted.append(config))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in re.findall(r"--env (\w+\.py)", page.read_text()):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    found = [[word for word in words if word not in ("--json", "--dry-run")] for words in commands(page.read_text())]
    for words in found:
        CliRunner().invoke(app, ["run", *words], catch_exceptions=False)
    assert len(accepted) == len(found)
    for config in accepted:
        name = config.trainer.model_name
        assert unusual_lr(config.trainer, DEMO_PARAMETERS if name == "runs/demo-model" else None) is None


def test_file_of_a_run_that_the_docs_show_is_accepted() -> None:
    tables = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "operating.md").read_text(), flags=re.DOTALL)
    (table,) = [table for table in tables if "run_dir" in table]
    assert build_run(tomllib.loads(table), {}).run_dir == Path("runs/sums-2")


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def test_links_between_pages_lead_somewhere() -> None:
    """To a file, and to a heading of it where the link names one."""

    def anchors(page: Path) -> set[str]:  # as GitHub calls the page's headings
        headings = re.findall(r"^#+ (.*)", prose(page), flags=re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    links = [
        (page, (page.parent / name).resolve() if name else page, anchor)
        for page in PAGES
        for name, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", prose(page))
    ]
    assert any(anchor for _, _, anchor in links)
    assert not [
        (page.name, target.name, anchor)
        for page, target, anchor in links
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_a_page_names_are_there(page: Path) -> None:
    """But for those that the changelog says are gone, and those of other programs in the page on migration."""
    if page.name not in ("CHANGELOG.md", "migration.md"):
        named = {*re.findall(r"(?<![\w-])--[a-z][a-z0-9_.-]*[a-z0-9_]", page.read_text())}
        known = known_flags() | FLAGS_ELSEWHERE
        assert not {flag for flag in named - known if flag.replace("--no-", "--") not in known}


def test_files_that_pages_name_are_there() -> None:
    """Paths in code spans, in CONTRIBUTING and AGENTS too; and pages that sources name."""
    top = {path.name for path in ROOT.iterdir()}
    named = [(page.name, path) for page in PAGES for path in re.findall(r"`([\w./]+/[\w.]*\w)`", page.read_text())]
    wrong = [
        (page, path) for page, path in named if path.split("/")[0] in top - {"runs"} and not (ROOT / path).exists()
    ]
    folders = ("grpo_common", "grpo_trainer", "vllm_server", "environments", "scripts", "configs", "tests")
    sources = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".sh", ".toml")]
    for source in sources:
        for path in re.findall(r"\bdocs/[\w/]+\.(?:md|csv)\b", source.read_text(errors="replace")):
            wrong += [(source.name, path)] * (not (ROOT / path).exists())
    assert not {*wrong} - {("CONTRIBUTING.md", path) for path in OF_EXAMPLES}


def test_messages_that_troubleshooting_quotes_are_those_of_the_code() -> None:
    """Some words in a row of each stand in a source."""
    packages = ("grpo_common", "grpo_trainer", "vllm_server", "environments")
    sources = [path.read_text() for name in packages for path in sorted((ROOT / name).rglob("*.py"))]
    code = " ".join(re.sub(r'["\']\s*f?["\']', "", "\n".join(sources)).split())
    _, _, text = (ROOT / "docs" / "operating.md").read_text().partition("## It refuses to start")
    quoted = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    assert len(quoted) > 40
    of_others = ("User-specified max_model_len", "Exceeded concurrency limit")
    values_only = ("--run-dir runs/a: in use", "--log-to: got", "--shared-weights: got", "server: starting")

    def parts(message: str) -> set[str]:
        words = message.replace("…", " ").split()
        runs = [
            " ".join(words[at : at + count]).rstrip(",;:.") for count in (2, 3) for at in range(len(words) - count + 1)
        ]
        return {run for run in runs if len(run) >= 8}

    unknown = [each for each in quoted if not any(part in code for part in parts(each))]
    assert [each for each in unknown if not each.startswith((*of_others, *values_only))] == []


AVOIDED = r"\b(anew|of its own|so many|goes without|whoever|gives? back|in vain|looked at|(is|are|was|were) told)\b"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_in_plain_english(page: Path) -> None:
    assert re.findall(AVOIDED, prose(page)) == []


# docs/migration.md names every flag of the original, and what it says is here is here; so do its rows on trl ---


GUIDE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()

TRAINER = (
    "--model --model-name --lr --training-steps --batch-size --seq-len --gradient-accumulation-steps --device "
    "--save-path --checkpoint-interval --kl-coef --clip-eps --no-reference-logprobs --vllm-port "
    "--gpu-memory-utilization --vllm-gpu-memory-utilization --max-model-len --dtype --vllm-restart-interval "
    "--atropos-url --use-wandb "
    "--wandb-project --wandb-group --weight-bridge-mode --vllm-config-path --lora-r --lora-alpha --lora-dropout "
    "--lora-target-modules --trainer-rank --world-size --init-method --num-inference-nodes --debug-loading --benchmark "
    "--log-dir --warmup-steps --train-layer-indices --lora-layer-indices --vllm-gpu --adafactor-scale-parameter "
    "--adafactor-relative-step"
)


def row_of(flag: str, table: str) -> list[str]:
    """The cells of the flag's row in the table whose head has that text."""
    _, _, after = GUIDE.partition(table)
    lines = [line for line in after.partition("\n\n")[0].splitlines() if f"`{flag}`" in line.split("|")[1]]
    assert len(lines) == 1, (flag, lines)
    return [cell.strip() for cell in lines[0].split("|")[1:-1]]


@pytest.mark.parametrize("flag", TRAINER.split())
def test_every_flag_of_the_trainer_has_a_row_that_is_true(flag: str) -> None:
    ours = {name for leaf in options_of(TrainConfig) for name in (*leaf.flags, *leaf.former)}
    here = row_of(flag, "| there | default there | here | |\n")[2]
    if "the same" in here:
        assert flag in ours
    elif here.startswith("`"):
        assert re.findall(r"`(--[a-z.-]+)", here)[0] in ours
    else:
        assert here == "none" and flag not in ours


@pytest.mark.parametrize(("kind", "config"), [("env", Gsm8kConfig), ("openai", ServerConfig)])
def test_every_flag_of_the_environment_has_a_row_that_is_true(kind: str, config: type[BaseModel]) -> None:
    library = pytest.importorskip("atroposlib.envs.base", reason="the original's: pip install atroposlib==0.4.0")
    original = library.BaseEnvConfig if kind == "env" else library.APIServerConfig
    for name in original.model_fields:
        here = row_of(name, f"| `--{kind}.…` there")[-1]
        known = name in config.model_fields or name == "max_num_workers"  # an alias
        assert known == (not here.startswith("none") and not here.startswith("`--openai.timeout")), (name, here)


def rows_from_trl() -> list[list[str]]:
    _, _, after = GUIDE.partition("| `GRPOTrainer`, `GRPOConfig` | `grpo run` | |\n")
    return [line.split("|")[1:-1] for line in after.partition("\n\n")[0].splitlines()[1:]]


def from_trl(words: str, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    found: list[RunConfig] = []
    monkeypatch.setattr("grpo_trainer.run.run", lambda config, console: found.append(config))
    needed = {"--model": "m", "--reward": "exact_match"} if "--data" in words else {"--model": "m"}
    needed |= {"--data": "rows.jsonl"} if "--reward" in words else {}
    more = [word for flag, value in needed.items() if flag not in words for word in (flag, value)]
    CliRunner().invoke(app, ["run", *shlex.split(words), *more], catch_exceptions=False)
    return found[0]


@pytest.mark.parametrize("cells", rows_from_trl(), ids=lambda cells: cells[0].strip())
def test_every_row_from_trl_is_accepted_in_both_spellings(cells: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, here, other = (cell.strip() for cell in cells)
    if here == "none":
        return
    config = from_trl(here.strip("`"), monkeypatch)
    if re.fullmatch(r"`--[a-z-]+ [^`]+`", other):
        flag, value = other.strip("`").split(" ", 1)
        for spelled in (flag, flag.replace("-", "_").replace("__", "--", 1)):
            assert from_trl(f"{spelled} {value}", monkeypatch) == config


# the example configurations load, and fit the gpus that they name -------------------------------------------


CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
SMOLLM2 = ModelShape(576, 1536, layers=30, heads=9, kv_heads=3, head_dim=64, vocab=49_152, tied=True, positions=8192)
COUNTS = {"two_gpus": 2, "four_gpus": 4}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_loads_and_keeps_the_rules(path: Path) -> None:
    config = build_run(read_toml(path), {"model_name": "m"} if path.stem == "quickstart" else {})
    gpus = 8 if path.stem == "several_machines" else COUNTS.get(path.stem, 1)
    assert check(config, Hardware(on_gpu=True, gpus=gpus)) == []
    ports = dict.fromkeys(("api", "trainers", *config.server.names), 1)
    processes = {each.name for each in plan_run(config, ports, python="p", on_gpu=True).processes}
    assert {f"env-{each.name}" for each in config.environments} < processes


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if re.search(r"GPUs? of \d+ GB", path.read_text())], ids=lambda path: path.stem
)
def test_a_config_fits_the_gpus_that_it_names(path: Path) -> None:
    text, config = path.read_text(), build_run(read_toml(path), {})
    size = re.search(r"Qwen2.5-(\d\.?\d?B)", text)
    shape = SHAPES[size[1].lower()] if size else SMOLLM2
    gpus = COUNTS.get(path.stem, 1)
    (gigabytes,) = map(int, re.findall(r"GPUs? of (\d+) GB", text))
    devices = Devices("cuda", gigabytes * 10**9, gpus)
    plan = Setup(config.trainer, shape, devices, config.options.trainer_gpus).plan()
    assert not plan.problems and not plan.is_tight, plan
    small = Setup(config.trainer, shape, replace(devices, total=4 * 10**9), config.options.trainer_gpus).plan()
    assert small.problems or small.is_tight
    gpu = Gpu("G", "u", gigabytes * 10**9, gigabytes * 10**9)
    machine = Machine("3.12.0", 1, gpus=(gpu,) * gpus)
    case = Case(machine, config)
    case.shape = (shape, "")
    case.run = config
    for finding in (sequence_length(case), servers_gpus(case)):
        assert finding is not None and finding.status == "ok", finding


def test_readme_fits_on_a_few_screens_and_begins_with_what_to_type() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 160 and len(text.split()) <= 1_600
    first = ("![", "bash scripts/quickstart.sh", "bash scripts/test.sh", "it learnt:", "--reward my_rewards.py", "\n|")
    places = [text.index(each) for each in first]
    assert places == sorted(places) and text[: text.index("it learnt:")].count("\n") < 25


# papers --------------------------------------------------------------------------------------------------------------


PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text().partition("## Papers")[2].partition("\n## ")[0]
PAPERS = re.findall(r"^\| .+? \| `(--[^`]+)` \|", PAGE, re.MULTILINE)


def test_the_papers_are_all_there() -> None:
    """The flags of each build a configuration."""
    found = {build(TrainConfig, {"model_name": "m", **values_of(flags)}).loss for flags in PAPERS}
    assert found == {"grpo", "dapo", "dr_grpo", "gspo", "cispo", "sapo"}
