#!/usr/bin/env bash
# Single copy: server and trainer have one copy of the weights on one GPU (or in main memory); all of them are trained
# in place, within a fence.
#
#   scripts/train_single_copy.sh
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct ENVIRONMENT=gsm8k SEQ_LEN=1024 LR=1e-6 scripts/train_single_copy.sh \
#       --optimizer adamw_8bit --gradient-checkpointing
#
# Four processes, started one by one as you would by hand. Settings are listed in recipe.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh"

begin single-copy
start api "$PYTHON" -m grpo_trainer api --port "$API_PORT" --store "$RUN_DIR/queue.sqlite"
start server env VLLM_ENABLE_SHARED_WEIGHTS=1 LOGDIR="$RUN_DIR" "$PYTHON" -m grpo_trainer serve --model "$MODEL" \
    --port "$VLLM_PORT" --dtype "$DTYPE" --max-model-len "$SEQ_LEN" "${gpu_flags[@]}"
wait_for api "http://127.0.0.1:$API_PORT/" 60
wait_for server "http://127.0.0.1:$VLLM_PORT/health" 900
start_environment
train --single-copy --vllm-config-path "$RUN_DIR/vllm_bridge_config.json" --lr "${LR:-1e-4}" "$@"
