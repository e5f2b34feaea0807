#!/usr/bin/env bash
# Legacy: all weights are trained; the trainer starts the server itself, and anew on them every few steps.
#
#   scripts/train_legacy.sh
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct ENVIRONMENT=gsm8k SEQ_LEN=1024 LR=1e-6 scripts/train_legacy.sh \
#       --vllm-restart-interval 5
#
# Three processes, started one by one as you would by hand. Settings are listed in recipe.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

begin legacy
start api "$PYTHON" -m grpo_trainer api --port "$API_PORT" --store "$RUN_DIR/queue.sqlite"
wait_for api "http://127.0.0.1:$API_PORT/" 60
environment_flags+=(--env.retry_timeout 900) # the server is away while it restarts
start_environment
train --weight-bridge-mode none --max-model-len "$SEQ_LEN" --lr "${LR:-1e-4}" "${gpu_flags[@]}" "$@"
