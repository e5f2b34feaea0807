#!/usr/bin/env bash
# From nothing to a rising reward: installs, makes a model, trains it with GRPO on real parts, says how it went.
#
#   scripts/quickstart.sh [--released] [--out DIR] [--steps N]
#
# Four processes talk HTTP: a vLLM server, the rollout API, an environment and the trainer, whose LoRA adapter is swapped
# into the running server at each step. A small model that is built here learns sums of two numbers: works without a GPU
# (2 cores, 8 GB); with one it uses it. --released: SmolLM2-135M-Instruct, downloaded, learns word problems instead, on
# a GPU; on a CPU for the few steps that --steps names, each a sixteenth as large.
#
# A second run reuses the installation and the model. The last line of stdout is a JSON object; the exit code is not 0 if
# in 40 steps or more the mean reward did not rise by 0.3.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

out=$repository/runs/quickstart
model=demo-model
make=()
config=configs/quickstart.toml
flags=()
rise=(0.3) # the least rise of the mean reward, from its first five steps to its last five
while [ $# -gt 0 ]; do
    case $1 in
        --released) model=smollm2 make=(--released) config=configs/smollm2_words.toml; shift ;;
        --out) out=${2:?--out wants a folder}; shift 2 ;;
        --steps) # a short run has a short warm-up
            [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || fail "--steps ${2:-}: wanted a number of 1 or more"
            flags=(--training-steps "$2" --warmup-steps $(($2 > 10 ? 5 : $2 / 2)))
            [ "$2" -ge 40 ] || rise=()
            shift 2 ;;
        -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
        *) fail "$1: unknown option; wanted --released, --out DIR, --steps N" ;;
    esac
done
if [ $model = smollm2 ] && ! nvidia-smi --list-gpus >/dev/null 2>&1; then
    [ ${#flags[@]} -gt 0 ] || fail "--released: no GPU here (nvidia-smi lists none); 200 steps on two CPU cores would" \
        "take more than two days. --steps 3 takes three, with 32 sequences instead of 512: about 7 minutes on two busy cores"
    flags+=(--gradient-accumulation-steps 4)
fi

check_memory 6
prepare envs,wandb
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$repository"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

[ -f "$out/$model/config.json" ] || "$PYTHON" -m grpo_trainer demo-model "$out/$model" "${make[@]}"
run_dir=$out/$(date +%Y%m%d-%H%M%S)
# free ports: the machine may have other runs
"$PYTHON" -m grpo_trainer run --config "$config" --model "$out/$model" --run-dir "$run_dir" --api.port 0 --server.port 0 "${flags[@]}"
"$PYTHON" - "$run_dir" "${rise[@]}" <<'PYTHON'
import json, sys
from pathlib import Path
from statistics import fmean

from grpo_trainer.metrics.rows import ENDS, read_rows

run_dir, least = sys.argv[1], float(sys.argv[2]) if sys.argv[2:] else float("-inf")
rows = read_rows(Path(run_dir, "metrics.jsonl"))
rewards = [row["reward/mean"] for row in rows]
start, end = fmean(rewards[:ENDS]), fmean(rewards[-ENDS:])
seconds = round(sum(row["train/seconds"] for row in rows), 1)
print(json.dumps({"reward_start": round(start, 4), "reward_end": round(end, 4), "steps": rows[-1]["step"],
                  "seconds": seconds, "run_dir": run_dir}))
if end - start < least:
    sys.exit(f"the reward rose by {end - start:.3f}, wanted {least} or more; see {run_dir}")
PYTHON
{
    echo "the model, for runs of your own: $out/$model"
    print_path
} >&2 # the last line of stdout is the JSON object
