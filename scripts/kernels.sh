#!/usr/bin/env bash
# Build src/lamina/devices/kernels/pages.* from pages.cu: PTX for any GPU from 8.0 on, and code for the
# ones that engines run on. Needs nvcc and ptxas; with PTXAS of CUDA 12.8 (the package
# nvidia-cuda-nvcc-cu12 has it) drivers from 12.8 on load the result.
set -euo pipefail
cd "$(dirname "$0")/../src/lamina/devices/kernels"
ptxas=${PTXAS:-ptxas}
nvcc -ptx -arch=compute_80 -o pages.ptx pages.cu
# What the kernels use is in the oldest PTX that knows 8.0, which every driver compiles.
sed -i 's/^\.version .*/.version 7.0/; /^\/\//d' pages.ptx
for architecture in 80 90 100 120; do
  "$ptxas" -arch=sm_$architecture -o pages.sm_$architecture.cubin pages.ptx
done
