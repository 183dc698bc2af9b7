#!/usr/bin/env bash
# Pack what an offline GPU host with Python 3.12, NumPy and pytest lacks to run Lamina, into .gpu/
# (git-ignored, a few MiB). Run it where a package index can be reached; then copy the checkout with
# .gpu/ to the host and run scripts/gpu/run.sh there.
set -euo pipefail
cd "$(dirname "$0")/../.."
platforms=()
for glibc in 39 38 37 36 35 34 31 28 27 26 24 17 12 5; do
  platforms+=(--platform "manylinux_2_${glibc}_x86_64")
done
rm -rf .gpu/wheels
python3 -m pip download --quiet --disable-pip-version-check --only-binary=:all: \
  --python-version 3.12 --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 \
  --dest .gpu/wheels msgspec typer rich prometheus-client starlette uvicorn hypothesis threadpoolctl
du -sh .gpu/wheels
