#!/usr/bin/env bash
# Trains by one weight bridge, with all processes of `grpo run`:
#
#   scripts/train.sh MODE [OPTIONS OF grpo run]
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct ENVIRONMENT=gsm8k SEQ_LEN=1024 LR=1e-5 scripts/train.sh lora --kl-beta 0.01
#
# MODE is lora (each step's adapter goes into the running server), single_copy (server and trainer have one copy of the
# weights, all of them trained), legacy (all weights, the server restarted on checkpoints) or a value of
# --weight-bridge-mode. Settings come from the environment:
#
#   MODEL=FOLDER or hub name   default: runs/demo-model, which is built if it is not there
#   ENVIRONMENT=NAME           arithmetic (default), gsm8k, or your own file; its options follow as --env.NAME VALUE
#   STEPS=20  BATCH_SIZE=16 (sequences in a microbatch)  ACCUMULATION=8 (microbatches in a step)  GROUP_SIZE=8
#   SEQ_LEN=64  LR=…  LORA_R=16  DTYPE=…
#   RUN_DIR=FOLDER             default: a new one in runs/; a run that it holds is resumed
#   API_PORT=…  VLLM_PORT=…    default: free ones
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case ${1:-} in
    '' | -h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit ;;
    lora) bridge=lora_only rate=5e-4 ;;
    single_copy) bridge=shared_vllm rate=1e-4 ;;
    legacy) bridge=none rate=1e-4 ;;
    *) bridge=$1 rate= ;;
esac
check_memory 6
prepare envs,wandb
cd "$repository"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
if [ -z "${MODEL:-}" ]; then
    MODEL=runs/demo-model
    [ -f "$MODEL/config.json" ] || "$PYTHON" -m grpo_trainer demo-model "$MODEL"
    LR=${LR:-$rate} # the demo model is small: its rates are high
fi
options=(--run-dir "${RUN_DIR:-runs/$1-$(date +%Y%m%d-%H%M%S)}" --resume auto)
options+=(--api.port "${API_PORT:-0}" --server.port "${VLLM_PORT:-0}" --training-steps "${STEPS:-20}")
options+=(--batch-size "${BATCH_SIZE:-16}" --gradient-accumulation-steps "${ACCUMULATION:-8}" --seq-len "${SEQ_LEN:-64}")
options+=(--env "${ENVIRONMENT:-arithmetic}" --env.group_size "${GROUP_SIZE:-8}")
[[ $bridge != lora_* ]] || options+=(--lora-r "${LORA_R:-16}")
[ -z "${LR:-}" ] || options+=(--lr "$LR")
[ -z "${DTYPE:-}" ] || options+=(--dtype "$DTYPE")
exec "$PYTHON" -m grpo_trainer run --model "$MODEL" --weight-bridge-mode "$bridge" "${options[@]}" "${@:2}"
