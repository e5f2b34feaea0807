"""The rules of the house (CONTRIBUTING.md) that a machine can hold."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from environments.running.settings_check import BUILT_IN

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "vllm", "peft", "numpy", "ray")
PACKAGES = ("grpo_common", "vllm_server", "environments", "grpo_trainer")


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports(path: Path, *, for_types: bool = True) -> list[str]:
    """Full names of all that a file imports, at any depth; on request without what only type checkers see."""
    found, unseen = list[str](), set[ast.AST]()
    for node in nodes(path):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            unseen |= {*ast.walk(node)}
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_pattern_has_a_possessive_repeat_of_a_group(package: str) -> None:
    """Python before 3.11.5 matches them wrongly (python/cpython#106052); those of a set of characters are right."""
    possessive = re.compile(r"\)(?:[*+?]|\{\d*,?\d*\})\+")
    for path in sources(package):
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
                text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                assert not possessive.search(text), (path, text)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_looks_like_a_field_is_one(package: str) -> None:
    """An `InitVar` with a default is an attribute of the class: an instance shows the default, whatever it got."""
    assert not [path for path in sources(package) if "dataclasses.InitVar" in imports(path)]


SETTINGS_CHECK = "environments.running.settings_check"


@pytest.mark.parametrize(
    ("package", "others", "allowed"),
    [
        ("grpo_common", ("grpo_trainer", "vllm_server", "environments", *HEAVY), ()),
        ("vllm_server", ("grpo_trainer", "environments"), ()),
        ("environments", ("grpo_trainer", "vllm_server"), ("vllm_server.protocol",)),
        ("grpo_trainer", ("vllm",), ()),
        (
            "grpo_trainer",
            ("vllm_server", "environments"),
            ("vllm_server.protocol", "environments.api.wire", SETTINGS_CHECK),
        ),
    ],
)
def test_packages_import_of_others_only_what_is_allowed(
    package: str, others: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    found = [(str(path.relative_to(ROOT)), name) for path in sources(package) for name in imports(path)]
    offenders = [one for one in found if any(inside(one[1], other) for other in others)]
    assert not [one for one in offenders if not any(inside(one[1], each) for each in allowed)]


def test_only_who_starts_environments_checks_their_settings() -> None:
    paths = [path for path in sources("grpo_trainer") if any(inside(name, SETTINGS_CHECK) for name in imports(path))]
    assert all(path.relative_to(ROOT / "grpo_trainer").parts[0] in ("config", "launch", "doctor") for path in paths)


def test_loop_and_trainer_do_not_ask_for_the_mode() -> None:
    for name in ("loop.py", "trainer.py"):
        found = nodes(ROOT / "grpo_trainer" / name)
        attributes = {node.attr for node in found if isinstance(node, ast.Attribute)}
        assert attributes and "mode" not in attributes


BUILT_IN_ROOMS = [found.module.split(".")[1] for found in BUILT_IN.values()]
ROOMS = {
    "grpo_trainer": (
        *("errors", "signals", "files", "cache", "phases", "suggestions", "import_paths", "versions", "background"),
        *("locked_memory", "machine"),
        *("config", "metrics", "losses", "rollouts", "batch", "server_client", "optim"),
        *("model", "memory", "engine", "shared", "parallel", "policy"),
        *("saving", "launch", "alignment", "weights"),
        *("trainer", "feed", "logs"),
        *("shutdown", "loop", "run_defaults", "doctor", "bench", "report"),
        *("record", "run", "slurm", "dry_run", "servers", "cli"),
    ),
    "environments": (
        *("data_config", "config", "user_modules", "scoring", "items"),
        *("api", "peers", "trajectory", "tokenizers", "tool_calls", "conversation", "running"),
        *("base", "multi_turn", "maths", "dataset", "from_verifiers"),
        *(name for name in BUILT_IN_ROOMS if name not in ("dataset", "from_verifiers")),
        *("synthetic", "demo_model"),
        *("arithmetic_server", "gsm8k_server", "word_problems_server"),
    ),
}
"""Lowest first."""


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_those_below_them(package: str) -> None:
    rooms, offenders = ROOMS[package], []
    for path in sources(package):
        own = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):
            continue
        assert own in rooms, f"{own}: a new room; say where it stands"
        above = [f"{package}.{room}" for room in rooms[rooms.index(own) + 1 :]]
        found = [name for name in imports(path, for_types=False) if any(inside(name, room) for room in above)]
        offenders += [(str(path.relative_to(ROOT)), name) for name in found]
    assert not offenders


def test_no_files_import_each_other_in_a_circle() -> None:
    paths = [path for package in PACKAGES for path in sources(package)]
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}

    def file_of(name: str) -> str | None:
        return next((known for known in (name, name.rpartition(".")[0]) if known in files), None)

    arrows = {file: {file_of(name) for name in imports(path, for_types=False)} for file, path in files.items()}
    TopologicalSorter({file: found - {file, None} for file, found in arrows.items()}).prepare()


LEAST_S = 5.0
SHORT = {
    "its end is what the test expects": (
        "test_rollout_client.py test_client_tells_a_server_that_is_no_rollout_api",
        "test_rollout_client.py test_the_wait_for_a_batch_ends_with_the_apis_own_explanation",
        "test_environment_peers.py test_peer_is_gone_after_the_patience",
        "test_inference.py test_requests_share_the_detection_of_a_server_and_its_error",
        "test_inference.py test_servers_that_stay_silent_are_asked_again_until_the_patience_ends",
        "test_policy_publisher.py test_publisher_refuses_when_no_place_comes_free",
        "test_scoring.py test_threads_a_hung_function_is_named_and_gives_its_place_to_others",
        "test_server_client.py test_wait_for_servers_ends_in_time_and_is_a_phase",
    ),
    "it expects that nothing happens meanwhile": (
        "test_rollout_api_bounds.py test_our_environment_waits_for_room",
        "test_rollout_client.py test_a_lease_is_kept_for_as_long_as_training_takes",
        "test_memory_fit.py test_allocator_settings_last_while_a_thread_allocates",
        "test_mutations.py test_tests_that_have_ended_end_no_process_that_has_got_their_number",
        "test_agent_env.py test_a_command_that_has_ended_ends_no_process_that_has_got_its_number",
        "test_supervisor.py test_process_keeps_its_number_until_it_is_killed_and_ends_nothing_that_has_it_afterwards",
    ),
    "only what hangs takes time: the rest never waits": (
        "test_dataset_env.py test_dataset_evaluation_counts_failed_rows",
    ),
    "it tries again": ("bridge_contract.py Contract",),
}
"""Limits of time below `LEAST_S` in tests that no slow machine breaks, by the reason."""


def short_limits(path: Path) -> Iterator[str]:
    """Functions and classes of a test file that give a limit of time as a small number."""
    for part in ast.parse(path.read_text()).body:
        for call in [node for node in ast.walk(part) if isinstance(node, ast.Call)]:
            name = ast.unparse(call.func).rpartition(".")[2]
            given = call.args if name in ("wait_for", "wait", "join", "result", "timeout") else []
            named = [each.value for each in call.keywords if re.search("(timeout|patience)$", each.arg or "")]
            numbers = [each.value for each in (*given, *named) if isinstance(each, ast.Constant)]
            if any(isinstance(each, (int, float)) and 0 < each < LEAST_S for each in numbers):
                yield f"{path.name} {getattr(part, 'name', '')}"


def test_no_test_depends_on_a_short_time() -> None:
    found = {each for path in sources("tests") for each in short_limits(path)}
    assert found == {each for places in SHORT.values() for each in places}


HELPS = {
    "grpo_trainer": ("run", "doctor"),
    "grpo_trainer run": ("--model-name", "--help-all"),
    "vllm_server": ("--model", "--port", "--max-lora-rank", "--shared-weights", "--help-all"),
    "environments.api": ("--port", "--store"),
    "environments.arithmetic": ("serve", "process", "evaluate"),
    "environments.demo_model": ("--released", "--seed"),
}
"""Commands, and what one screen of their help shows."""
LIGHT = f"""
import contextlib, io, json, runpy, sys

heavy, shown = {(*HEAVY, "datasets", "verifiers")}, {{}}


def light(what):
    assert not [name for name in heavy if name in sys.modules], what


import environments.api.wire, vllm_server.protocol

assert "pydantic" not in sys.modules
import grpo_trainer.config.run, grpo_trainer.config.train

light("options")
for command in {[*HELPS]}:
    module, *words = command.split()
    sys.argv = ["x", *words, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            assert not end.code, command
    shown[command] = output.getvalue()
    light(command)
from environments.running.settings_check import check

for name in ("arithmetic", "gsm8k", "verifiers", "word_problems"):
    check(name, {{}})
light("settings of environments")
from grpo_trainer.doctor.checks import examine
from grpo_trainer.machine import look

examine(look(), None)
light("the doctor")
from grpo_trainer.run import joined

with joined(None, 1):
    assert "ray" not in sys.modules, "a run without a cluster"
print(json.dumps(shown))
"""


def test_light_edges() -> None:
    """In one process, in this order: what a later part needs, no earlier one has imported."""
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    for command, words in HELPS.items():
        assert all(word in shown[command] for word in words), command
        assert len(shown[command].splitlines()) <= 60, "it is one screen"
