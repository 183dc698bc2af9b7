#!/usr/bin/env bash
# On the GPU host: the tests of tests/gpu/vllm on vLLM's runners V1 and V2, with synchronous and
# asynchronous scheduling, spread over the visible GPUs. Fails when any of the four does.
#   scripts/gpu/test_vllm.sh [RESULTS] [PYTEST OPTIONS...]      logs go to RESULTS/vllm-<which>.log
set -euo pipefail
cd "$(dirname "$0")/../.."
results=${1:-.gpu/results}
shift || true
mkdir -p "$results"
source scripts/gpu/env.sh
gpus=$(nvidia-smi --list-gpus | wc -l)
cores=$(($(nproc) / gpus))
declare -A running
number=0
for runner in V2 V1; do
  for async in 1 0; do
    which=$runner-async$async
    gpu=$((number % gpus))
    VLLM_CACHE_ROOT=/tmp/vllm-cache-$which CUDA_VISIBLE_DEVICES=$gpu LAMINA_VLLM_RUNNER=$runner LAMINA_VLLM_ASYNC=$async \
      taskset -c "$((gpu * cores))-$(((gpu + 1) * cores - 1))" \
      python3 -m pytest -q -p no:cacheprovider -o faulthandler_timeout=120 --show-capture=no --tb=short --maxfail=4 --durations=5 \
      tests/gpu/vllm "$@" > "$results/vllm-$which.log" 2>&1 &
    running[$which]=$!
    number=$((number + 1))
  done
done
failed=0
for which in "${!running[@]}"; do
  wait "${running[$which]}" || failed=1
  echo "== $which"
  grep -E "^(FAILED|ERROR|E  )|passed|failed|error" "$results/vllm-$which.log" | tail -n 25 || true
done
echo "over after $SECONDS s"
exit "$failed"
