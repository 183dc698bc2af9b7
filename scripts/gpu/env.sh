# Source this on the GPU host, in the repository's root: puts Lamina and what is packed in .gpu/ on
# PYTHONPATH. Of .gpu/wheels (Lamina's needs), .gpu/vllm and .gpu/lmcache, what is there is installed.
_sites=${TMPDIR:-/tmp}/lamina-sites
_install() { # SITE WHEELS...
  python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$@"
}
if [ ! -d "$_sites/lamina" ]; then
  _install "$_sites/lamina" .gpu/wheels/*.whl
fi
if [ -d .gpu/vllm ] && [ ! -d "$_sites/vllm" ]; then
  _install "$_sites/vllm" .gpu/vllm/wheels/*.whl
  mkdir -p "$_sites/vllm/vllm/vllm_flash_attn"
  tar -xJf .gpu/vllm/python.tar.xz -C "$_sites/vllm" &
  xz -dc .gpu/vllm/C.so.xz > "$_sites/vllm/vllm/_C_stable_libtorch.abi3.so" &
  xz -dc .gpu/vllm/fa3.so.xz > "$_sites/vllm/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
  wait
  cp -r .gpu/vllm/stub/. "$_sites/vllm/"
fi
if [ -d .gpu/lmcache ] && [ ! -d "$_sites/lmcache" ]; then
  _install "$_sites/lmcache" .gpu/lmcache/*.whl
fi
export PYTHONPATH=$PWD/src:$PWD:$_sites/vllm:$_sites/lamina:$_sites/lmcache PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0
unset -f _install
