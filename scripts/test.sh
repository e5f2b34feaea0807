#!/usr/bin/env bash
# Makes the environment and runs every check: lint, types, tests, a real vLLM server among them.
#
#   scripts/test.sh [PYTEST ARGUMENTS]      with arguments only pytest runs, with them
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

check_memory 6
prepare envs,dev,qlora
cd "$repository"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} HF_HUB_OFFLINE=1 WANDB_MODE=offline
if [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m pyright --pythonpath "$PYTHON"
exec "$PYTHON" -m pytest
