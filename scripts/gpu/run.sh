#!/usr/bin/env bash
# On the GPU host: install what pack.sh packed, run the GPU tests and the transfer benchmark.
#   scripts/gpu/run.sh [RESULTS]      JSON and logs go to RESULTS (default .gpu/results)
set -euo pipefail
cd "$(dirname "$0")/../.."
results=${1:-.gpu/results}
mkdir -p "$results"
source scripts/gpu/env.sh
nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current --format=csv,noheader
python3 -m pytest -q tests/devices tests/gpu -p no:cacheprovider 2>&1 | tee "$results/tests.log" | tail -n 15
python3 -m lamina.cli bench transfer --device cuda --page-bytes 64KiB,32KiB --widths 1,2,3,8,32 \
  --concurrency 1,4 --json > "$results/h200-transfer.json"
python3 -m lamina.bench.show "$results/h200-transfer.json"
