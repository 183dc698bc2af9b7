#!/usr/bin/env bash
# On the GPU host: `lamina bench vllm` on every GPU at once, an engine a GPU.
#   scripts/gpu/bench_vllm.sh RESULTS [OPTIONS...]
# Each OPTIONS is one engine's command line; engine i goes to GPU i modulo the GPUs, with its share
# of the cores; those of one GPU follow each other. JSON goes to RESULTS/engine-<i>.json as it grows.
# LIMIT_S: all must be over so many seconds after the script began (default 570).
set -euo pipefail
cd "$(dirname "$0")/../.."
results=$1
shift
mkdir -p "$results"
source scripts/gpu/env.sh
export COLUMNS=200 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
[ $# -gt 0 ] || set -- "--connector lamina" "--connector none" \
  "--connector offloading" "--connector offloading-v2"
gpus=$(nvidia-smi --list-gpus | wc -l)
cores=$(($(nproc) / gpus))
all=("$@")
echo "installed after $SECONDS s; ${#all[@]} engines on $gpus GPUs"

run_queue() { # GPU: its engines, one after the other
  local gpu=$1 i
  for ((i = gpu; i < ${#all[@]}; i += gpus)); do
    local waiting=$(((${#all[@]} - 1 - i) / gpus))
    local limit=$(((${LIMIT_S:-570} - 25 - SECONDS) / (waiting + 1)))
    # shellcheck disable=SC2086  # OPTIONS are words
    VLLM_CACHE_ROOT=/tmp/vllm-cache-$gpu taskset -c "$((gpu * cores))-$(((gpu + 1) * cores - 1))" \
      timeout -k 5 "$((limit + 15))" python3 -m lamina_lab bench vllm --gpu "$gpu" \
      --save "$results/engine-$i.json" --limit-s "$limit" ${all[$i]} > "/tmp/engine-$i.log" 2>&1 ||
      echo "engine $i (${all[$i]}) exited with $?; the end of its log:" "$(tail -n 15 "/tmp/engine-$i.log")"
  done
}
for ((gpu = 0; gpu < gpus; gpu++)); do run_queue "$gpu" & done
wait
tail -n 400 /tmp/engine-*.log > "$results/engines.log"
python3 -m lamina_lab bench vllm --merge "$results"/engine-*.json \
  --plot "$results/ttft.png" || echo "not all was right: see above"
echo "over after $SECONDS s"
