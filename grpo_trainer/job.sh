# shellcheck shell=bash disable=SC2154 # `grpo run --slurm` writes lines before these: what the job asks for, `programs`
# (the folder of grpo and ray) and `command` (the arguments of `grpo run`).
set -euo pipefail
umask 077
cd "$folder"
ray=$programs/ray

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    "$programs/python" -c 'import ray; print(ray.util.get_node_ip_address())')
port=$((20000 + SLURM_JOB_ID % 20000))
export RAY_ADDRESS=$address:$port RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0 # the job's nodes are for the run; Ray's own 15 would make its processes wait for others

# Anyone who reaches Ray could run programs, so it requires this token, which only the job's processes have.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

started=()
# shellcheck disable=SC2329 # the trap calls it
finish() {
    [ "${#started[@]}" -eq 0 ] || kill "${started[@]}" 2>/dev/null || true
    wait
}
trap finish EXIT

cores=(--cpus-per-task="${SLURM_CPUS_ON_NODE:-1}")
srun --overlap "${cores[@]}" --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    "$ray" start --head --node-ip-address="$address" --port="$port" --include-dashboard=false --block &
started+=($!)
others=$((${#nodes[@]} - 1))
if [ "$others" -gt 0 ]; then
    srun --overlap "${cores[@]}" --nodes="$others" --ntasks="$others" --exclude="${nodes[0]}" \
        "$ray" start --address="$RAY_ADDRESS" --block &
    started+=($!)
fi

"$programs/grpo" run "${command[@]}" &
run=$!
trap 'kill -TERM "$run" 2>/dev/null || true' TERM INT
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do # a signal has ended the wait, not the run
    code=0
    wait "$run" || code=$?
done
exit "$code"
