#!/usr/bin/env bash
# A released model learns, on one GPU: word problems by three weight bridges, lora_only with three seeds, and GSM8K. Plain
# transformers answers held-out questions before and after (held_out.json), and plot_runs.py draws the curves.
#
#   scripts/learn_released.sh [DIR [OPTIONS OF grpo run]]       default: runs/released
#   GSM8K=FOLDER scripts/learn_released.sh                      with train.jsonl and test.jsonl, where there is no hub
#
# Interrupted, the same command goes on: finished runs are kept, others are resumed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

out=${1:-$repository/runs/released}
[ $# -eq 0 ] || shift
check_memory 6
prepare envs,wandb,dev
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$repository"
model=$out/smollm2
[ -f "$model/config.json" ] || "$PYTHON" -m grpo_trainer demo-model "$model" --released
words=(word_problems --env.level 1-2 --env.max_token_length 256)
gsm8k=(gsm8k --env.max_token_length 640)
[ -z "${GSM8K:-}" ] || gsm8k+=(--env.dataset_path "$GSM8K")

# ask FOLDER RESULT TASK…: held-out questions, once.
ask() {
    [ -s "$2" ] || { "$PYTHON" scripts/held_out.py "$3" "$1" "${@:4}" >"$2.partial" && mv "$2.partial" "$2"; }
    echo "$2: $(cat "$2")"
}

# learn CONFIG SEED TASK…: a run and its held-out questions.
learn() {
    local run=$out/$1-$2 task=("${@:3}")
    [ -s "$run/held_out.json" ] ||
        "$PYTHON" -m grpo_trainer run --config "configs/smollm2_$1.toml" --model "$model" --run-dir "$run" --resume auto \
            --seed "$2" --env.seed "$2" "${task[@]:1}" "${options[@]}"
    ask "$(echo "$run"/checkpoints/*_final)" "$run/held_out.json" "${task[@]}"
}

options=("$@")
ask "$model" "$out/held_out-word_problems.json" "${words[@]}"
for seed in 0 1 2; do learn lora $seed "${words[@]}"; done
learn shared 0 "${words[@]}"
learn none 0 "${words[@]}"
runs=("lora_only=$out/lora-0" "lora_only=$out/lora-1" "lora_only=$out/lora-2" "shared_vllm=$out/shared-0" "none=$out/none-0")
"$PYTHON" scripts/plot_runs.py "${runs[@]}" --y reward/mean --y eval/word_problems_0/accuracy --out "$out/learning_released.png"
"$PYTHON" scripts/plot_runs.py "${runs[@]}" --x step --y length/completion_mean --y grpo/entropy \
    --y rollout/staleness_mean --y train/grad_norm --out "$out/learning_released_more.png"
ask "$model" "$out/held_out-gsm8k.json" "${gsm8k[@]}"
learn gsm8k 0 "${gsm8k[@]}"
"$PYTHON" scripts/plot_runs.py "lora_only=$out/gsm8k-0" --y reward/mean --out "$out/learning_gsm8k.png"
