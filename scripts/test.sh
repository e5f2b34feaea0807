#!/usr/bin/env bash
# Makes the environment and runs the checks: lint, types, tests, a real vLLM server among them.
#
#   scripts/test.sh                       the default lane: minutes; CONTRIBUTING.md says what it has
#   scripts/test.sh --all                 every lane
#   scripts/test.sh [PYTEST ARGUMENTS]    only pytest, with these arguments
#
# GRPO_REQUIRE_BROWSER=1: tests of pages fail, rather than skip, where no Chromium is found.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

check_memory 6
prepare envs,dev,qlora
cd "$repository"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} HF_HUB_OFFLINE=1 WANDB_MODE=offline
lane=(-m "not complete and not gpu")
case ${1:-} in
    '') ;;
    --all) [ $# -eq 1 ] || fail "--all takes no other arguments; wanted --all, or arguments of pytest"
        lane=(--hypothesis-profile=many) ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
    *) exec "$PYTHON" -m pytest "$@" ;;
esac
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m pyright --pythonpath "$PYTHON"
# One process a core for what starts no servers; those who start some use both cores themselves.
"$PYTHON" -m pytest --numprocesses 2 tests/unit tests/contract "${lane[@]}"
"$PYTHON" -m pytest tests/bridges tests/integration tests/gpu "${lane[@]}"
