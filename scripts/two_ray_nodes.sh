#!/usr/bin/env bash
# Two Ray nodes of one GPU each on this machine: the trainer on the first, a server on the second, adapters by NCCL. While it
# trains, a third node with the second GPU joins, gets a server, and the first server is dropped. 20 steps later the run is
# stopped. Prints a JSON line.
#
#   scripts/two_ray_nodes.sh FOLDER [OPTIONS OF grpo run]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

[ $# -ge 1 ] || { sed -n '2,/^set/p' "$0" | grep '^#'; exit 2; }
out=$1
shift
prepare envs,wandb,dev,ray
cd "$repository"
mkdir -p "$out"
run=$out/run port=6399 nodes=()
[ -f "$out/demo/config.json" ] || "$PYTHON" -m grpo_trainer demo-model "$out/demo"

# shellcheck disable=SC2329 # called by the trap
finish() {
    [ -z "${training:-}" ] || kill "$training" 2>/dev/null || true
    [ -z "${training:-}" ] || wait "$training" 2>/dev/null || true
    kill "${nodes[@]}" 2>/dev/null || true # all at once: each takes many seconds to end
    wait "${nodes[@]}" 2>/dev/null || true
}
trap finish EXIT

# node GPU OPTIONS…: a Ray node, as a child of this script.
node() {
    local log=$out/ray-${#nodes[@]}.log
    CUDA_VISIBLE_DEVICES=$1 "$PYTHON" -m ray.scripts.scripts start --block --num-cpus 2 --num-gpus 1 --disable-usage-stats \
        "${@:2}" >"$log" 2>&1 &
    nodes+=($!)
    until grep -q "Ray runtime started" "$log"; do kill -0 "${nodes[-1]}"; sleep 0.5; done
}

step() { cat "$run/metrics.jsonl" 2>/dev/null | wc -l; }
until_step() { until [ "$(step)" -ge "$1" ]; do kill -0 "$training"; sleep 1; done; }
serving() { "$PYTHON" -m grpo_trainer servers --run-dir "$run" --json | "$PYTHON" -c 'import json, sys
print(sum(row["state"] == "serves" for row in json.load(sys.stdin)))'; }
until_serving() { until [ "$(serving)" = "$1" ]; do kill -0 "$training"; sleep 1; done; }

node 0 --head --port $port --include-dashboard false
node 1 --address 127.0.0.1:$port
"$PYTHON" -m grpo_trainer run --cluster 127.0.0.1:$port --cluster-nodes 2 --config configs/quickstart.toml --model-name "$out/demo" \
    --run-dir "$run" --training-steps 2000 --weight-bridge-mode lora_only --server.gpu-memory-utilization 0.25 "$@" >"$out/log" 2>&1 &
training=$!
until_step 20
node 1 --address 127.0.0.1:$port
"$PYTHON" -m grpo_trainer servers add --run-dir "$run" >&2
until_serving 2
both=$(step)
"$PYTHON" -m grpo_trainer servers drop server --run-dir "$run" >&2
until_serving 1
one=$(step)
until_step $((one + 20))
kill "$training"
wait "$training" || true
training=
"$PYTHON" - "$run/metrics.jsonl" "$both" "$one" <<'P'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
mean = lambda key, part: round(sum(row.get(key, 0.0) for row in part) / len(part), 4)
print(json.dumps({
    "steps": len(rows), "each_once": [row["step"] for row in rows] == list(range(1, len(rows) + 1)),
    "two_servers_at_step": int(sys.argv[2]), "one_server_at_step": int(sys.argv[3]),
    "reward_first_15": mean("reward/mean", rows[:15]), "reward_last_15": mean("reward/mean", rows[-15:]),
    "publish_s": mean("train/sync_time", rows), "step_s": mean("train/seconds", rows),
}))
P
