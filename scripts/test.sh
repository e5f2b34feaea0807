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
prepare envs,wandb,dev,qlora,ray
cd "$repository"
lane=(tests/bridges tests/contract tests/unit -m "not complete")
case ${1:-} in
    '') ;;
    --all) [ $# -eq 1 ] || fail "--all takes no other arguments; wanted --all, or arguments of pytest"
        lane=(tests/bridges tests/integration tests/gpu tests/contract tests/unit --hypothesis-profile=many) ;;
    -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
    *) exec "$PYTHON" -m pytest "$@" ;;
esac
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# pyright uses one core for minutes, and runs beside the tests.
types=$(mktemp)
trap 'rm -f "$types"; kill %1 2>/dev/null || true' EXIT
"$PYTHON" -m pyright --pythonpath "$PYTHON" >"$types" 2>&1 &
pyright=$!
failed=0
# Three processes on two cores: those that start servers wait for half of their time. tests/conftest.py has the longest
# files first; xdist would begin with those that have the most tests. It would also repeat a test that ended its process.
"$PYTHON" -m pytest "${lane[@]}" --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 ||
    failed=$?
wait "$pyright" || failed=$?
cat "$types"
exit "$failed"
