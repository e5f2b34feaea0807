#!/usr/bin/env bash
# From nothing to a rising reward: installs, builds a small model, trains it with GRPO on real parts, says how it went.
#
#   scripts/quickstart.sh [--out DIR] [--steps N]
#
# Four processes talk HTTP: a vLLM server, the rollout API, an environment (sums of two numbers) and the trainer, whose
# LoRA adapter is swapped into the running server at each step. Works without a GPU (2 cores, 8 GB); with one it uses it.
# A second run reuses the installation and the model. The last line is a JSON object; the exit code is not 0 if in 40 steps
# or more the mean reward did not rise by 0.3.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

out=$repository/runs/quickstart
steps=()
rise=(--min-rise 0.3)
while [ $# -gt 0 ]; do
    case $1 in
        --out) out=${2:?--out wants a folder}; shift 2 ;;
        --steps) # a short run has a short warm-up
            [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || fail "--steps ${2:-}: wanted a number of 1 or more"
            steps=(--training-steps "$2" --warmup-steps $(($2 > 10 ? 5 : $2 / 2)))
            [ "$2" -ge 40 ] || rise=()
            shift 2 ;;
        -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
        *) fail "$1: unknown option; wanted --out DIR, --steps N" ;;
    esac
done

check_memory 6
prepare envs,wandb
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$repository"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

model=$out/demo-model
[ -f "$model/config.json" ] || "$PYTHON" -m grpo_trainer demo-model "$model"
run_dir=$out/$(date +%Y%m%d-%H%M%S)
"$PYTHON" -m grpo_trainer run --config configs/quickstart.toml --model "$model" --run-dir "$run_dir" "${steps[@]}"
"$PYTHON" -m grpo_trainer.metrics.summary "$run_dir" "${rise[@]}"
