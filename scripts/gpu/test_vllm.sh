#!/usr/bin/env bash
# On the GPU host: the tests of tests/gpu/vllm on vLLM's runners V1 and V2, with synchronous and
# asynchronous scheduling, spread over the visible GPUs, on both with tokens that do not depend on
# batches, and on both with an MLA model. Fails when any of them does.
#   scripts/gpu/test_vllm.sh [RESULTS] [PYTEST OPTIONS...]      logs go to RESULTS/vllm-<which>.log
# ONLY: a pattern of names (V2-async1, V1-mla, ...) to start no others.
# LIMIT_S: each ends after so many seconds, with what it found (default 450).
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
start() { # NAME RUNNER ASYNC BATCH_INVARIANT MODEL PYTEST OPTIONS...
  local name=$1 gpu=$((number % gpus))
  [[ $name =~ ${ONLY:-.} ]] || return 0
  CUDA_VISIBLE_DEVICES=$gpu LAMINA_VLLM_RUNNER=$2 LAMINA_VLLM_ASYNC=$3 VLLM_BATCH_INVARIANT=$4 \
    LAMINA_VLLM_MODEL=$5 \
    VLLM_CACHE_ROOT=/tmp/vllm-cache-$name \
    taskset -c "$((gpu * cores))-$(((gpu + 1) * cores - 1))" \
    timeout -s INT -k 10 "${LIMIT_S:-450}" \
    python3 -m pytest -q -p no:cacheprovider -o faulthandler_timeout=120 --show-capture=no \
    --tb=short -rfE --maxfail=4 --durations=5 tests/gpu/vllm "${@:6}" > "$results/vllm-$name.log" 2>&1 &
  running[$name]=$!
  number=$((number + 1))
}
for runner in V2 V1; do
  for async in 1 0; do
    start "$runner-async$async" "$runner" "$async" 0 small "$@"
  done
done
for runner in V2 V1; do
  start "$runner-exact" "$runner" 1 1 small "$@" # tokens that do not depend on batches
  start "$runner-mla" "$runner" 1 0 small-mla "$@"
done
failed=0
for which in "${!running[@]}"; do
  wait "${running[$which]}" || failed=1
  echo "== $which"
  grep -E "^(FAILED|ERROR|E  )|passed|failed|error" "$results/vllm-$which.log" | tail -n 25 || true
done
echo "over after $SECONDS s"
exit "$failed"
