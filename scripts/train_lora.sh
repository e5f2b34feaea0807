#!/usr/bin/env bash
# LoRA: each step's adapter goes into a slot of the running server under a new name; nothing restarts.
#
#   scripts/train_lora.sh
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct ENVIRONMENT=gsm8k SEQ_LEN=1024 LR=1e-5 scripts/train_lora.sh --kl-beta 0.01
#
# Four processes, started one by one as you would by hand. Settings are listed in recipe.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

begin lora
start api "$PYTHON" -m grpo_trainer api --port "$API_PORT" --store "$RUN_DIR/queue.sqlite"
start server "$PYTHON" -m grpo_trainer serve --model "$MODEL" --port "$VLLM_PORT" --dtype "$DTYPE" \
    --max-model-len "$SEQ_LEN" --max-lora-rank "$LORA_R" --lora-root "$RUN_DIR" "${gpu_flags[@]}"
wait_for api "http://127.0.0.1:$API_PORT/" 60
wait_for server "http://127.0.0.1:$VLLM_PORT/health" 900
start_environment
train --weight-bridge-mode lora_only --lora-r "$LORA_R" --lr "${LR:-5e-4}" "$@"
