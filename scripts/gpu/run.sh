#!/usr/bin/env bash
# On the GPU host: install what pack.sh packed, run the GPU tests and the transfer benchmark.
#   scripts/gpu/run.sh [RESULTS]      JSON and logs go to RESULTS (default .gpu/results)
set -euo pipefail
cd "$(dirname "$0")/../.."
results=${1:-.gpu/results}
mkdir -p "$results"
source scripts/gpu/env.sh
export COLUMNS=160
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python3 -m pytest -q -s -p no:cacheprovider tests/gpu --ignore tests/gpu/vllm > "$results/tests.log" 2>&1 || true
tail -n 12 "$results/tests.log"
compute-sanitizer --log-file "$results/sanitizer.log" --target-processes all \
  python3 -m pytest -q -p no:cacheprovider tests/gpu/test_cuda_server.py -k "width and 3" || true
tail -n 2 "$results/sanitizer.log"
python3 -m lamina_lab bench transfer --device cuda --page-bytes 64KiB,32KiB --widths 1,8,32 \
  --concurrency 1,4 --rounds 15 --overlap --save "$results/h200-transfer.json"
