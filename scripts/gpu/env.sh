# Source this on the GPU host: puts Lamina and its packed dependencies on PYTHONPATH.
site=${TMPDIR:-/tmp}/lamina-site
if [ ! -d "$site" ]; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" .gpu/wheels/*.whl
fi
export PYTHONPATH=$PWD/src:$PWD:$site PYTHONUNBUFFERED=1
