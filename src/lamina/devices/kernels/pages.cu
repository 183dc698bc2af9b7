// Moves a record between a ring and an engine's pages, both in the memory of one GPU.
//
// A record holds [chunk][layer][plane][block][page bytes]; one launch moves a run of planes whose
// pages are of one size and of one group. `place_*` goes from the ring to the pages, `gather_*` from
// the pages to the ring; the number is the width in bytes of one access, to which all addresses,
// strides and sizes are aligned. A block id below 0 is not wanted. Kernels contain no wait, so they
// end. Build with scripts/kernels.sh, which also makes the files beside this one.

struct Plane {
  unsigned long long address;  // of the page of block 0
  unsigned long long stride_bytes;
};

struct Run {
  unsigned long long record;  // the run's first byte of the first chunk, in the ring
  unsigned long long chunk_stride_bytes;  // from a chunk to the next, in the record
  const Plane* planes;
  const int* block_ids;  // [chunk][block]
  unsigned chunks;
  unsigned plane_count;
  unsigned blocks_per_chunk;
  unsigned page_bytes;
};

constexpr unsigned kLanes = 32;
constexpr unsigned kDepth = 4;  // accesses of a lane in flight

// Ring bytes, pages and block ids are read past L1: others write them between launches, copy engines
// of another process among them.
template <typename Word>
__device__ Word load(const Word* at) {
  return __ldcg(at);
}

template <typename Word, bool kPlaces>
__device__ void move(const Run& run) {
  const unsigned words = run.page_bytes / sizeof(Word);
  const unsigned tiles = (words + kLanes * kDepth - 1) / (kLanes * kDepth);
  const unsigned end = run.chunks * run.plane_count * run.blocks_per_chunk * tiles;
  for (unsigned tile = blockIdx.x; tile < end; tile += gridDim.x) {
    const unsigned page = tile / tiles;
    const unsigned block = page % run.blocks_per_chunk;
    const unsigned row = page / run.blocks_per_chunk;
    const unsigned plane = row % run.plane_count;
    const unsigned chunk = row / run.plane_count;
    const int id = load(run.block_ids + chunk * run.blocks_per_chunk + block);
    if (id < 0) continue;
    const unsigned long long ring_address =
        run.record + chunk * run.chunk_stride_bytes +
        (1ull * plane * run.blocks_per_chunk + block) * run.page_bytes;
    const unsigned long long page_address =
        run.planes[plane].address + id * run.planes[plane].stride_bytes;
    const Word* from = reinterpret_cast<const Word*>(kPlaces ? ring_address : page_address);
    Word* to = reinterpret_cast<Word*>(kPlaces ? page_address : ring_address);
    const unsigned first = (tile % tiles) * kLanes * kDepth + threadIdx.x;
    Word held[kDepth];
#pragma unroll
    for (unsigned i = 0; i < kDepth; i++) {
      if (first + i * kLanes < words) held[i] = load(from + first + i * kLanes);
    }
#pragma unroll
    for (unsigned i = 0; i < kDepth; i++) {
      if (first + i * kLanes < words) __stcs(to + first + i * kLanes, held[i]);
    }
  }
}

#define KERNELS(bytes, Word)                                             \
  extern "C" __global__ void __maxnreg__(32) place_##bytes(Run run) { \
    move<Word, true>(run);                                               \
  }                                                                      \
  extern "C" __global__ void __maxnreg__(32) gather_##bytes(Run run) { \
    move<Word, false>(run);                                              \
  }

KERNELS(16, uint4)
KERNELS(8, uint2)
KERNELS(4, unsigned)
KERNELS(2, unsigned short)
KERNELS(1, unsigned char)

// Block ids from pinned host memory into the GPU's, once a transfer, so that no record reads them
// over the link again.
struct Fetch {
  int* to;
  const int* from;
  unsigned count;
};

extern "C" __global__ void fetch_ids(Fetch fetch) {
  const unsigned step = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < fetch.count; i += step) {
    fetch.to[i] = fetch.from[i];
  }
}
