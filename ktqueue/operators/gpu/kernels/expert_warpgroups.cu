// Products of many tokens with packed experts on Hopper's tensor cores: see expert_warpgroups.py, which compiles this
// file, and warpgroups.cuh. A warp decodes two panels at once: gate and up of the same rows, or neighbours of down.

#include "warpgroups.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int COUPLE_ROWS = activation == NONE ? 32 : 16;  // of a warp
constexpr int GROUP_ROWS = WARPS * COUPLE_ROWS;            // of a program
static_assert(ROWS % GROUP_ROWS == 0 && COLUMNS % 256 == 0);
constexpr int GROUPS = ROWS / GROUP_ROWS;
constexpr int STAGE_BYTES = 2 * SLOT_BYTES;
constexpr int STAGES = 2;  // superblocks of each of a warp's panels in shared memory

// What a program multiplies at once: a list of pairs of an expert by 16 or 32 rows for each of its warps.
struct Job {
  const uint8_t* panels;  // where the lane's first 16 bytes of its warp's first panel are
  const uint8_t* x;       // 16 bytes of the first chunk of row 0, at the thread's place in a row
  const uint32_t *pairs, *x_rows;  // [PAIRS], in shared memory
  int live, expert, couple;
};

template <int N>
__device__ inline void compute(float (&sums)[2][N / 2], const Job& job, uint8_t* ring, uint32_t ring_at_lane,
                               uint32_t chunks_at, int g, int t, int lane) {
  constexpr int OWN = N / 32;  // rows of a chunk that a thread copies 16 bytes of
  const int row = threadIdx.x / 8, part = threadIdx.x % 8;
  const uint32_t to_row = chunks_at + row * 128 + ((part ^ row % 8) << 4);
  uint32_t rows[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) rows[i] = job.x_rows[row + 32 * i];
  const auto fetch_chunk = [&](int chunk, int slot) {
#pragma unroll
    for (int i = 0; i < OWN; i++)
      if (row + 32 * i < job.live)
        copy(to_row + slot * CHUNK_BYTES + i * 32 * 128, job.x + int64(rows[i]) * (2 * COLUMNS) + chunk * 2 * CHUNK);
  };
  const auto fetch_block = [&](int block) {
    const uint32_t to = ring_at_lane + block % STAGES * STAGE_BYTES;
    const uint8_t* from = job.panels + block * SUPERBLOCK_BYTES;
    for (int side = 0; side < 2; side++) copy_block<SUPERBLOCK_BYTES>(to + side * SLOT_BYTES, from + side * PANEL_BYTES, lane);
  };
  fetch_block(0);
  for (int chunk = 0; chunk < 3; chunk++) {
    fetch_chunk(chunk, chunk);
    commit_copies();
  }
  for (int i = 0; i < N / 2; i++) sums[0][i] = sums[1][i] = 0.0f;
  uint32_t left[2][2][2][4];  // of two slabs, the sides, halves of a slab
  wait_for_copies<2>();
  __syncwarp();
  for (int side = 0; side < 2; side++) decode_slab(left[0][side], ring + side * SLOT_BYTES, 0, g, t);
  int slot = 0;
#pragma unroll 1
  for (int block = 0; block < BLOCKS; block++) {
    const uint8_t* here = ring + block % STAGES * STAGE_BYTES;
    const uint8_t* next = ring + (block + 1) % STAGES * STAGE_BYTES;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int chunk = 4 * block + c;
      wait_for_copies<2>();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      // All have multiplied by the chunk before the last, whose slot is free, and decoded the block before this one.
      if (chunk + 3 < CHUNKS) fetch_chunk(chunk + 3, slot < 2 ? slot + 3 : slot - 2);
      if (c == 0 && block + 1 < BLOCKS) fetch_block(block + 1);
      commit_copies();
      const unsigned long long right = right_operand(chunks_at + slot * CHUNK_BYTES);
      slot = slot == CHUNK_SLOTS - 1 ? 0 : slot + 1;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
          for (int side = 0; side < 2; side++)
            multiply<N>(sums[side], left[half][side][s], right + (half * 64 + s * 32) / 16);
        commit_products();
        wait_for_products<1>();
        const int slab = 2 * c + half + 1;
#pragma unroll
        for (int side = 0; side < 2; side++)
          if (slab < 8)
            decode_slab(left[1 - half][side], here + side * SLOT_BYTES, slab, g, t);
          else if (block + 1 < BLOCKS)
            decode_slab(left[1 - half][side], next + side * SLOT_BYTES, 0, g, t);
      }
    }
  }
  wait_for_products<0>();
#pragma unroll
  for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(sums[0][i]), "+f"(sums[1][i])::"memory");  // none is read before
}

// Of N pairs.
template <int N>
__device__ inline void store(const float (&sums)[2][N / 2], const Job& job, const Results& results, int g, int t) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    const int column = i / 2 * 8 + 2 * t + i % 2, at = i / 2 * 4 + i % 2;  // rows 2g and 2g + 1: at and at + 2
    if (column >= job.live) continue;
    const int64 pair = job.pairs[column];
    uint16_t* row = results.out + pair * ROWS;
    if constexpr (activation == NONE) {
#pragma unroll
      for (int side = 0; side < 2; side++)
        *reinterpret_cast<uint32_t*>(row + 32 * job.couple + 16 * side + 2 * g) =
            two_bfloat16(sums[side][at], sums[side][at + 2]);
    } else {
      float joined[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float gate = sums[0][at + 2 * r], up = sums[1][at + 2 * r];
        if constexpr (WEIGHTED) gate *= results.pair_weights[pair], up *= results.pair_weights[pair];
        if constexpr (BIASED) {
          const int64 here = int64(job.expert) * ROWS + 16 * job.couple + 2 * g + r;
          gate += results.bias[here], up += results.up_bias[here];
        }
        joined[r] = join<true>(gate, up);
      }
      const int place = 32 * (job.couple / 2) + 16 * (g / 2 % 2) + 8 * (g % 2) + 4 * (job.couple % 2) + 2 * (g / 4);
      *reinterpret_cast<uint32_t*>(row + place) = two_bfloat16(joined[0], joined[1]);
    }
  }
}

// By the fewest columns from N on that the pairs need.
template <int N>
__device__ inline void run(const Job& job, const Results& results, uint8_t* ring, uint32_t ring_at_lane,
                           uint32_t chunks_at, int g, int t, int lane) {
  if constexpr (N < PAIRS) {
    if (job.live > N) return run<N + 32>(job, results, ring, ring_at_lane, chunks_at, g, t, lane);
  }
  float sums[2][N / 2];
  compute<N>(sums, job, ring, ring_at_lane, chunks_at, g, t, lane);
  store<N>(sums, job, results, g, t);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    multiply_many(const uint8_t* pool, const int64* offsets, const uint16_t* x, const float* pair_weights,
                  const float* bias, const float* up_bias, uint16_t* out, const int* sorted_pairs, const int* starts,
                  const int* counts, int slots, int start) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ int ends[EXPERTS];
  __shared__ uint32_t pair_of[PAIRS], x_rows[PAIRS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint8_t* ring = memory + CHUNK_SLOTS * CHUNK_BYTES + warp * STAGES * STAGE_BYTES;
  const uint32_t ring_at_lane = static_cast<uint32_t>(__cvta_generic_to_shared(ring)) + place_of_byte(16 * lane);
  const uint32_t chunks_at = static_cast<uint32_t>(__cvta_generic_to_shared(memory));

  if (warp == 0) count_lists(ends, counts, lane);
  __syncthreads();
  const int jobs = ends[EXPERTS - 1] * GROUPS;
  const Results results = {pair_weights, bias, up_bias, out};
  for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
    const int list = job / GROUPS, group = job % GROUPS;
    const auto [expert, done, live] = find_list(ends, counts, list);
    __syncthreads();  // all have stored the products before
    if (threadIdx.x < PAIRS) {
      const int pair = threadIdx.x < live ? sorted_pairs[starts[expert] + done + threadIdx.x] : 0;
      pair_of[threadIdx.x] = pair;
      x_rows[threadIdx.x] = activation == NONE ? pair : pair / slots;
    }
    __syncthreads();
    const int couple = group * WARPS + warp;
    const Job one = {pool + offsets[expert] + start + int64(couple) * 2 * PANEL_BYTES + 16 * lane,
                     reinterpret_cast<const uint8_t*>(x) + threadIdx.x % 8 * 16,
                     pair_of, x_rows, live, expert, couple};
    run<32>(one, results, ring, ring_at_lane, chunks_at, g, t, lane);
  }
}
