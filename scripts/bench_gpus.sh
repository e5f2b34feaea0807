#!/usr/bin/env bash
# Measures on GPUs and writes each result, a JSON line with its command before it, to FOLDER/NAME.json. Models have random
# weights, or have learnt sums (fp8); each is written once.
#
#   scripts/bench_gpus.sh FOLDER                     on one GPU: loop pace disk fp8 shared; on two: the parts that need two
#   scripts/bench_gpus.sh FOLDER link broadcast      these parts
#   SHAPES="1.5b" STEPS=12 SECONDS_EACH=300 scripts/bench_gpus.sh FOLDER layouts
#
# SHAPES: of the parts that need two GPUs. STEPS: of each loop, 6 at least; layers are compiled however few they are. ONLY:
# measure only results whose name matches this expression. MODELS: folder of the models, 20 GB (default: /dev/shm/grpo-bench).
# What has a result is skipped: the same command goes on after an interruption.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

[ $# -ge 1 ] || { sed -n '2,/^set/p' "$0" | grep '^#'; exit 2; }
out=$1
shift
parts=("$@")
gpus=$(nvidia-smi --list-gpus | wc -l)
if [ ${#parts[@]} -eq 0 ] && [ "$gpus" -ge 2 ]; then
    parts=(link broadcast copies shards layouts cluster losses tensor_parallel)
elif [ ${#parts[@]} -eq 0 ]; then
    parts=(loop pace disk fp8 shared)
fi
shapes=${SHAPES:-"7b 1.5b 0.5b"}
models=${MODELS:-/dev/shm/grpo-bench}
prepare envs,wandb,dev
cd "$repository"
mkdir -p "$out" "$models"

# measure NAME COMMAND…: goes on after a failure, so that one run tells all.
measure() {
    local result=$out/$1.json seconds=$SECONDS
    [[ $1 =~ ${ONLY:-.} && ! -s $result ]] || return 0
    rm -rf "${out:?}/$1" # of a measurement that was interrupted: `grpo run` refuses a folder that holds a run
    echo "== $1: ${*:2}"
    if timeout --signal=INT --kill-after=30 "${SECONDS_EACH:-480}" "${@:2}" >"$out/$1.out" 2>"$out/$1.log"; then
        { echo "# ${*:2}" && tail -n 1 "$out/$1.out"; } >"$result"
        tail -n 1 "$result"
    else
        echo "FAILED: see $out/$1.log" && tail -n 5 "$out/$1.log"
    fi
    echo "   $((SECONDS - seconds)) s"
}

bench() { measure "$1" "$PYTHON" -m grpo_trainer bench "${@:2}"; }

# sync NAME SHAPE OPTIONS…: the trainer on the first GPU, the server on the second.
sync() {
    CUDA_VISIBLE_DEVICES=0 bench "$1" sync --shape "$2" --model-dir "$models/$2" --server-gpus 1 --load-seconds 8 --baseline-repeat 0 \
        --json "${@:3}"
}

# loop NAME SHAPE BRIDGE OPTIONS…: its folder keeps metrics and logs.
loop() {
    local steps=() options=("${@:4}")
    [[ " ${options[*]} " == *" -- "* ]] || options+=(--)
    [ -z "${STEPS:-}" ] || { steps=(--steps "$STEPS") && options+=(--compile "$([[ $1 == shards-* ]] && echo off || echo on)"); }
    bench "$1" loop --shape "$2" --model-dir "$models/$2" --bridge "$3" --run-dir "$out/$1" "${steps[@]}" "${options[@]}"
}

# layout NAME SHAPE BRIDGE OPTIONS…: a loop without checkpoints, which a comparison of layouts does not need.
layout() {
    local options=("${@:4}")
    [[ " ${options[*]} " == *" -- "* ]] || options+=(--)
    loop "${@:1:3}" "${options[@]}" --checkpoint-interval never
}

# states_of SHAPE: sets `states`. All of a 7B trainer on one GPU needs states in 8 bits, as in configs.
states_of() {
    states=()
    [ "$1" != 7b ] || states=(--optimizer adamw_8bit)
}

needs_two() { [ "$gpus" -ge 2 ] || { echo "$1 needs two GPUs; nvidia-smi lists $gpus" >&2 && exit 1; }; }

for part in "${parts[@]}"; do
    case $part in
    loop | pace | disk | fp8 | shared) ;;
    *) needs_two "$part" ;;
    esac
    case $part in
    loop) # the whole loop: all weights, adapters with one copy of the base model and with two
        loop loop-1.5b-shared_vllm 1.5b shared_vllm --steps 22
        loop loop-7b-lora_only-share-base 7b lora_only --share-base
        loop loop-7b-lora_only 7b lora_only
        loop loop-0.5b-shared_vllm 0.5b shared_vllm
        ;;
    pace) # what sets a server's pace, with the worker in the engine's process and in its own
        "$PYTHON" -m grpo_trainer.bench.random_model 1.5b "$models/1.5b"
        for executor in uni mp; do
            measure "pace-1.5b-$executor" "$PYTHON" scripts/server_pace.py "$models/1.5b" --log "$out/pace-1.5b-$executor-server.log" \
                --distributed-executor-backend $executor
        done
        ;;
    disk) # all weights into a server on the same GPU, without a restart
        for transport in disk cuda_ipc; do
            bench "disk-7b-$transport" sync --shape 7b --model-dir "$models/7b" --bridge broadcast --transport $transport \
                --staging on --gpu-memory-utilization 0.35 --repeat 5 --skip-load --baseline-repeat 0 --json
        done
        ;;
    fp8) # a model that has learnt sums: speed with adapters, the task learnt with 8-bit rollouts, how far both sides are apart
        [ -f "$models/sums-7b/config.json" ] || "$PYTHON" scripts/sums_model.py "$models/sums-7b" --shape 7b
        [ -f "$models/demo/config.json" ] || "$PYTHON" -m grpo_trainer demo-model "$models/demo"
        for weights in none fp8; do
            bench "fp8-7b-weights-$weights" sync --shape 7b --model-dir "$models/sums-7b" --concurrency 256 --load-seconds 12 \
                --gpu-memory-utilization 0.35 --baseline-repeat 0 --quantization $weights --json
            measure "fp8-demo-weights-$weights" "$PYTHON" -m grpo_trainer run --config configs/quickstart.toml --model "$models/demo" \
                --run-dir "$out/fp8-demo-weights-$weights" --training-steps 150 --server.quantization $weights
        done
        measure fp8-truth "$PYTHON" scripts/truth_table.py "$models/sums-7b" --out "$out/fp8-truth"
        ;;
    shared) # single copy: attach, write, memory beside it
        bench shared-7b sync --shape 7b --model-dir "$models/7b" --bridge shared_vllm --load-seconds 8 \
            --gpu-memory-utilization 0.5 --json
        ;;
    link) # what the link gives, and what NCCL sees
        nvidia-smi topo -m | tee "$out/topology.txt"
        measure link "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 scripts/bench_link.py --gb 15.2
        ;;
    broadcast) # all weights from one GPU to a server on the other; under load for the first shape alone
        for shape in $shapes; do
            load=(--skip-load)
            [ "$shape" != "${shapes%% *}" ] || load=()
            sync "broadcast-$shape-staging-on" "$shape" --bridge broadcast --transport nccl --staging on "${load[@]}"
            sync "broadcast-$shape-staging-off" "$shape" --bridge broadcast --transport nccl --staging off --skip-load
        done
        ;;
    copies) # single copy on two GPUs, and on one of them
        for shape in $shapes; do
            states_of "$shape"
            layout "copies-$shape-two" "$shape" shared_vllm -- --trainer-gpus 2 "${states[@]}"
            CUDA_VISIBLE_DEVICES=0 layout "copies-$shape-one" "$shape" shared_vllm -- "${states[@]}"
        done
        ;;
    shards) # one copy of a model over two GPUs; 14B does not fit on one of 80 GB, 32B not on one of 141
        shards=(--trainer-gpus 2 --server.tensor-parallel-size 2)
        for shape in ${SHAPES:-7b 32b}; do
            size=() states=()
            [ "$shape" = 7b ] || size=(--dummy-weights --sequences 64) states=(--optimizer adamw_8bit)
            layout "shards-$shape" "$shape" shared_vllm "${size[@]}" -- "${shards[@]}" "${states[@]}"
        done
        ;;
    layouts) # which layout for which size
        for shape in $shapes; do
            states_of "$shape"
            layout "layouts-$shape-broadcast" "$shape" broadcast -- --server.gpus 1 "${states[@]}"
            layout "layouts-$shape-lora_only" "$shape" lora_only --transport nccl -- --server.gpus 1
            layout "layouts-$shape-lora_only-copies" "$shape" lora_only --share-base -- --trainer-gpus 2
            layout "layouts-$shape-broadcast-fsdp" "$shape" broadcast -- --trainer-gpus 2 --server.replicas 2 --server.gpus "0;1" \
                "${states[@]}"
        done
        ;;
    cluster) # two Ray nodes of one GPU each: adapters by NCCL, a server joins, another leaves
        measure cluster bash scripts/two_ray_nodes.sh "$out/cluster"
        ;;
    losses) # the same losses as on one GPU
        step=(-m grpo_trainer.bench step --shape 7b --seqs 64 --prompt-len 512 --completion-len 1024 --lognormal
            --max-tokens-per-microbatch 16384 --compile off --warmup 2 --steps 6 --json)
        measure losses-two "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "${step[@]}"
        measure losses-one "$PYTHON" "${step[@]}"
        ;;
    tensor_parallel) # a server over both GPUs, adapters while it generates
        bench tensor_parallel sync --shape 7b --model-dir "$models/7b" --tensor-parallel-size 2 --transport disk \
            --gpu-memory-utilization 0.3 --load-seconds 10 --baseline-repeat 0 --json
        ;;
    *)
        echo "no part is called $part; there are: loop pace disk fp8 shared link broadcast copies shards layouts cluster losses tensor_parallel" >&2
        exit 2
        ;;
    esac
done
