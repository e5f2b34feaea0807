#!/usr/bin/env bash
# Is this box fit? The doctor, then a few steps of each weight bridge on the demo model, and the GPU tests. Without a GPU
# the same on the CPU. Ends with a line for each part; the exit code says whether all went well. About 5 minutes.
#
#   scripts/gpu_check.sh
#   MODEL=/models/Qwen2.5-0.5B-Instruct scripts/gpu_check.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

check_memory 6
prepare envs,wandb,dev
cd "$repository"
out=$repository/runs/gpu-check-$(date +%Y%m%d-%H%M%S)
mkdir -p "$out"
declare -A outcome=()

# part NAME COMMAND…: goes on after a failure, so that one run tells all.
part() {
    local name=$1 seconds=$SECONDS
    shift
    echo "== $name"
    if "$@" > >(tee "$out/$name.log") 2>&1; then
        outcome[$name]="ok      $((SECONDS - seconds)) s"
    else
        outcome[$name]="FAILED  see $out/$name.log"
    fi
}

# shellcheck disable=SC2329 # called by `part`
train() { # MODE
    STEPS=${STEPS:-4} BATCH_SIZE=16 ACCUMULATION=2 RUN_DIR="$out/$1" bash scripts/train.sh "$1"
}

nvidia-smi --list-gpus >/dev/null 2>&1 || echo "no GPU here (nvidia-smi lists none): the CPU is checked instead"
part doctor "$PYTHON" -m grpo_trainer doctor
for name in lora single_copy legacy; do part "$name" train "$name"; done
if nvidia-smi --list-gpus >/dev/null 2>&1; then
    part gpu_tests "$PYTHON" -m pytest -q tests/gpu
else
    outcome[gpu_tests]="skipped, no GPU: all of the above ran on the CPU"
fi

echo
failed=0
for name in doctor lora single_copy legacy gpu_tests; do
    printf '%-12s %s\n' "$name" "${outcome[$name]}"
    [[ ${outcome[$name]} == FAILED* ]] && failed=1
done
exit "$failed"
