# shellcheck shell=bash
# Sourced by the train_*.sh recipes: settings, and processes that are ended here if they were started here.
#
# All settings come from the environment:
#
#   MODEL=FOLDER or hub name   default: runs/demo-model, which is built if it is not there
#   ENVIRONMENT=NAME           arithmetic (default), gsm8k, or the module of your own
#   ENVIRONMENT_FLAGS="…"      more of its options, for example "--env.dataset_path /data/gsm8k"
#   STEPS=20  BATCH_SIZE=16 (sequences in a microbatch)  ACCUMULATION=8 (microbatches in a step)  GROUP_SIZE=8
#   SEQ_LEN=64  LR=…  LORA_R=16  DTYPE=float32 without a GPU, else bfloat16
#   GPU_MEMORY=0.45            the server's share of the GPU
#   RUN_DIR=FOLDER             default: a new one in runs/; one that holds a run is gone on with
#   API_PORT=8000  VLLM_PORT=9001
#
# What stands after the script's name goes to `grpo train`.

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

ENVIRONMENT=${ENVIRONMENT:-arithmetic} STEPS=${STEPS:-20} BATCH_SIZE=${BATCH_SIZE:-16} ACCUMULATION=${ACCUMULATION:-8}
GROUP_SIZE=${GROUP_SIZE:-8} SEQ_LEN=${SEQ_LEN:-64} LORA_R=${LORA_R:-16} GPU_MEMORY=${GPU_MEMORY:-0.45}
API_PORT=${API_PORT:-8000} VLLM_PORT=${VLLM_PORT:-9001}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
declare -A started=()
read -r -a environment_flags <<<"${ENVIRONMENT_FLAGS:-}" # more than start_environment gives it

# begin RECIPE: Python, model, folder; from here on whatever was started ends with the script.
begin() {
    check_memory 6
    prepare envs,wandb
    cd "$repository" || exit
    if [ -z "${MODEL:-}" ]; then
        MODEL=runs/demo-model
        [ -f "$MODEL/config.json" ] || "$PYTHON" -m grpo_trainer demo-model "$MODEL"
    fi
    gpu_flags=()
    if nvidia-smi --list-gpus >/dev/null 2>&1; then
        DTYPE=${DTYPE:-bfloat16}
        # shellcheck disable=SC2034 # used by the recipe, in the command that starts vLLM
        gpu_flags=(--gpu-memory-utilization "$GPU_MEMORY")
    fi
    DTYPE=${DTYPE:-float32}
    RUN_DIR=${RUN_DIR:-runs/$1-$(date +%Y%m%d-%H%M%S)}
    mkdir -p "$RUN_DIR/logs"
    RUN_DIR=$(cd "$RUN_DIR" && pwd)
    [ -e "$RUN_DIR/metrics.jsonl" ] || rm -f "$RUN_DIR"/queue.sqlite* # of a start that came to no step
    trap stop_all EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    echo "run folder $RUN_DIR"
}

# start NAME COMMAND…: in a process group of its own, its output in the run's logs.
start() {
    local name=$1
    shift
    setsid "$@" >>"$RUN_DIR/logs/$name.log" 2>&1 </dev/null &
    started[$name]=$!
}

# wait_for NAME URL SECONDS: until it answers; fails with its last lines if it ends, or does not in time.
wait_for() {
    "$PYTHON" - "${started[$1]}" "$2" "$3" <<'PYTHON' || fail_with "$1" "is not ready at $2"
import os, sys, time, urllib.error, urllib.request
pid, url, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
end = time.monotonic() + seconds

def is_alive():
    try:  # a child of the shell that has ended stays as a zombie until the shell waits for it
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

while time.monotonic() < end:
    if not is_alive():
        sys.exit(1)
    try:
        sys.exit(opener.open(url, timeout=5).status != 200)
    except (urllib.error.URLError, OSError):
        time.sleep(0.3)
sys.exit(1)
PYTHON
}

fail_with() { # NAME what
    tail -n 20 "$RUN_DIR/logs/$1.log" >&2
    fail "$1 $2; its log is $RUN_DIR/logs/$1.log"
}

start_environment() {
    start environment "$PYTHON" -m grpo_trainer env "$ENVIRONMENT" serve --env.tokenizer_name "$MODEL" \
        --env.rollout_server_url "http://127.0.0.1:$API_PORT" --env.group_size "$GROUP_SIZE" \
        --env.max_token_length "$SEQ_LEN" --openai.base_url "http://127.0.0.1:$VLLM_PORT/v1" \
        --openai.model_name "$MODEL" "${environment_flags[@]}"
}

# train FLAGS…: in the foreground until all steps are done; the other processes are watched meanwhile.
train() {
    local resume=never name log=$RUN_DIR/logs/trainer.log old
    touch "$log"         # `tail` looks at once
    old=$(wc -l <"$log") # lines of a run that is gone on with
    [ -e "$RUN_DIR/metrics.jsonl" ] && resume=auto
    start trainer "$PYTHON" -m grpo_trainer train --model "$MODEL" --dtype "$DTYPE" --seq-len "$SEQ_LEN" \
        --atropos-url "http://127.0.0.1:$API_PORT" --vllm-port "$VLLM_PORT" --training-steps "$STEPS" \
        --batch-size "$BATCH_SIZE" --gradient-accumulation-steps "$ACCUMULATION" --save-path "$RUN_DIR/checkpoints" \
        --log-dir "$RUN_DIR" --resume "$resume" "$@"
    tail --pid "${started[trainer]}" -n +$((old + 1)) -f "$log" &
    while kill -0 "${started[trainer]}" 2>/dev/null; do
        for name in api server environment; do
            if [ -z "${started[$name]:-}" ] || kill -0 "${started[$name]}" 2>/dev/null; then continue; fi
            # An environment may be done a little before the trainer; nobody else may.
            if ! wait "${started[$name]}" || [ "$name" != environment ]; then fail_with "$name" "has ended"; fi
            unset "started[$name]"
        done
        sleep 0.5
    done
    wait "${started[trainer]}" || fail_with trainer "failed"
    "$PYTHON" -m grpo_trainer report "$RUN_DIR"
}

# Each group gets SIGTERM and the time to save, then SIGKILL.
stop_all() {
    local name pid waited
    for name in trainer environment server api; do
        pid=${started[$name]:-}
        if [ -z "$pid" ] || ! kill -TERM -- "-$pid" 2>/dev/null; then continue; fi
        for ((waited = 0; waited < 150; waited++)); do
            kill -0 -- "-$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL -- "-$pid" 2>/dev/null || true
    done
}
