#!/usr/bin/env bash
# Measures what needs two GPUs and writes each result, a JSON line with its command before it, to FOLDER/PART.json.
# Models have random weights; each is written once.
#
#   scripts/bench_two_gpus.sh FOLDER                     all parts, the most wanted first
#   scripts/bench_two_gpus.sh FOLDER link broadcast      these parts
#   SHAPES="1.5b" SECONDS_EACH=300 scripts/bench_two_gpus.sh FOLDER layouts
#
# Parts that have a result are skipped: the same command goes on after an interruption.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

[ $# -ge 1 ] || { sed -n '2,/^set/p' "$0" | grep '^#'; exit 2; }
out=$1
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(link broadcast copies layouts losses tensor_parallel)
shapes=${SHAPES:-"7b 1.5b 0.5b"}
models=${MODELS:-/dev/shm/grpo-bench}
prepare envs,wandb,dev
cd "$repository"
mkdir -p "$out" "$models"
[ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ] || { echo "two GPUs are needed; nvidia-smi lists fewer" >&2; exit 1; }

# measure NAME COMMAND…: goes on after a failure, so that one run tells all.
measure() {
    local result=$out/$1.json seconds=$SECONDS
    [ ! -s "$result" ] || return 0
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

# loop NAME SHAPE BRIDGE OPTIONS…
loop() { bench "$1" loop --shape "$2" --model-dir "$models/$2" --steps 20 --bridge "${@:3}"; }

for part in "${parts[@]}"; do
    case $part in
    link) # what the link gives, and what NCCL sees
        nvidia-smi topo -m | tee "$out/topology.txt"
        measure link "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 scripts/bench_link.py --gb 15.2
        ;;
    broadcast) # all weights from one GPU to a server on the other
        for shape in $shapes; do
            for staging in on off; do
                sync "broadcast-$shape-staging-$staging" "$shape" --bridge broadcast --transport nccl --staging $staging
            done
        done
        ;;
    copies) # single copy on two GPUs, and on one of them
        for shape in $shapes; do
            loop "copies-$shape-two" "$shape" shared_vllm -- --trainer-gpus 2
            CUDA_VISIBLE_DEVICES=0 loop "copies-$shape-one" "$shape" shared_vllm
        done
        ;;
    layouts) # which layout for which size
        for shape in $shapes; do
            loop "layouts-$shape-broadcast" "$shape" broadcast -- --server.gpus 1
            loop "layouts-$shape-lora_only" "$shape" lora_only --transport nccl -- --server.gpus 1
            loop "layouts-$shape-lora_only-copies" "$shape" lora_only --share-base -- --trainer-gpus 2
            loop "layouts-$shape-broadcast-fsdp" "$shape" broadcast -- --trainer-gpus 2 --server.replicas 2 --server.gpus "0;1"
        done
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
        echo "no part is called $part; there are: link broadcast copies layouts losses tensor_parallel" >&2
        exit 2
        ;;
    esac
done
