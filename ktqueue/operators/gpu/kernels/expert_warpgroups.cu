// Products of many tokens with packed experts: see expert_warpgroups.py, which compiles this file.
//
// Up to PAIRS pairs of an expert are a list, by which weights are decoded once. Three warpgroups have parts of their
// own:
//
// - One copies packed panels and rows of x to shared memory, and goes on to the next list while this one is multiplied.
// - Two multiply. A warp decodes one panel of 16 rows, and a warpgroup multiplies 64 rows by all pairs. Of gate and up,
//   its first two warps have gate's rows and the others up's. At the end, each gives half of its pairs to the other.
//   The second warpgroup begins later, so that one stores its products while the other multiplies.
//
// They tell each other by mbarriers which chunks of x are there (`full`), and which are multiplied (`empty`).

#include "warpgroups.cuh"

constexpr int WARPS = 8;  // that multiply
constexpr int THREADS = 32 * WARPS;
constexpr int COPYING = 128;     // threads
constexpr int GROUP_PANELS = 8;  // of a program
constexpr int GROUPS = ROWS / (activation == NONE ? 128 : 64);
static_assert(ROWS % (activation == NONE ? 128 : 64) == 0 && COLUMNS % 256 == 0);
constexpr int STAGES = 2;         // superblocks of each panel in shared memory
static_assert(CHUNK_SLOTS <= 5);  // a chunk that is empty then says that the superblock before its own is decoded
constexpr int PANELS_BYTES = GROUP_PANELS * STAGES * SLOT_BYTES;
constexpr int DELAY = 1500;    // nanoseconds by which the second warpgroup begins later
constexpr int EXCHANGED = 16;  // sums that a thread gives to the other matrix's warp at once
constexpr int COPYING_BARRIER = 15;
constexpr int INFOS = 3;  // a list is copied, one is multiplied, and one may still be stored

// Where a thread is in the ring of chunks.
struct Place {
  int slot;
  uint32_t parity;
  __device__ void advance() {
    if (++slot == CHUNK_SLOTS) slot = 0, parity ^= 1;
  }
};

struct Info {
  int live, expert, group;  // live: 0 behind the last list
  uint32_t pairs[PAIRS];
  float weights[WEIGHTED ? PAIRS : 1];  // of pairs
};

struct Barriers {  // addresses of the first of each
  uint32_t full, empty, listed;
};

__device__ __forceinline__ void copy_lists(const uint8_t* pool, const int64* offsets, const uint16_t* x,
                                           const float* pair_weights, const int* sorted_pairs, const int* starts,
                                           const int* counts, int slots, int start, const int* ends, int* counter,
                                           int* next_job, Info* infos, uint32_t chunks_at, uint32_t panels_at,
                                           const Barriers& barriers) {
  constexpr int OWN = PAIRS / (COPYING / 8);  // rows of a chunk that a thread copies 16 bytes of
  const int thread = threadIdx.x - THREADS, lane = thread % 32, warp = thread / 32;
  const int first_row = thread / 8, part = thread % 8;
  const uint32_t to_row = chunks_at + first_row * 128 + ((part ^ first_row % 8) << 4);
  const uint32_t to_panel = panels_at + 2 * warp * STAGES * SLOT_BYTES + place_of_byte(16 * lane);
  const uint8_t* x_here = reinterpret_cast<const uint8_t*>(x) + part * 16;
  const int jobs = ends[EXPERTS - 1] * GROUPS;
  Place place = {0, 1};
  int stage = 0, number = 0;
  for (int job = blockIdx.x, taken = 0; job < jobs; taken ^= 1) {
    if (TAKES_JOBS && thread == 0) next_job[taken] = gridDim.x + atomicAdd(counter, 1);
    const int group = job % GROUPS;
    const List list = find_list(ends, counts, job / GROUPS);
    const int live = list.live;
    const int* sorted = sorted_pairs + starts[list.expert] + list.done;
    Info& info = infos[number];
    uint32_t rows[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int row = first_row + COPYING / 8 * i, pair = row < live ? sorted[row] : 0;
      if (part == i % 8) {
        info.pairs[row] = pair;
        if constexpr (WEIGHTED) info.weights[row] = pair_weights[pair];
      }
      rows[i] = activation == NONE ? pair : pair / slots;
    }
    if (thread == 0) info.live = live, info.expert = list.expert, info.group = group;
    arrive(barriers.listed + 8 * number);
    number = number == INFOS - 1 ? 0 : number + 1;
    // Of gate and up, panels of both are neighbours.
    const int panel =
        activation == NONE ? GROUP_PANELS * group + 2 * warp : 2 * (GROUP_PANELS / 2 * group + warp / 2 * 2) + warp % 2;
    constexpr int NEXT_PANEL = activation == NONE ? PANEL_BYTES : 2 * PANEL_BYTES;
    const uint8_t* panels = pool + offsets[list.expert] + start + int64(panel) * PANEL_BYTES + 16 * lane;
    const uint8_t* columns = x_here;
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      wait(barriers.empty + 8 * place.slot, place.parity);
      if (chunk % 4 == 0) {
        copy_block<SUPERBLOCK_BYTES>(to_panel + stage * SLOT_BYTES, panels, lane);
        copy_block<SUPERBLOCK_BYTES>(to_panel + (STAGES + stage) * SLOT_BYTES, panels + NEXT_PANEL, lane);
        stage ^= 1;
        panels += SUPERBLOCK_BYTES;
      }
      const uint32_t to = to_row + place.slot * CHUNK_BYTES;
#pragma unroll
      for (int i = 0; i < OWN; i++)
        if (first_row + COPYING / 8 * i < live)
          copy(to + i * (COPYING / 8) * 128, columns + int64(rows[i]) * (2 * COLUMNS));
      arrive_with_copies(barriers.full + 8 * place.slot);
      columns += 2 * CHUNK;
      place.advance();
    }
    if constexpr (TAKES_JOBS) {
      asm volatile("bar.sync %0, %1;" ::"n"(COPYING_BARRIER), "n"(COPYING) : "memory");
      job = next_job[taken];
    } else {
      job += gridDim.x;
    }
  }
  infos[number].live = 0;
  arrive(barriers.listed + 8 * number);
  commit_copies();
  wait_for_copies<0>();
}

// Multiply a list by one panel. panel: its superblocks in shared memory. Chunk 0 is there.
template <int N>
__device__ __forceinline__ void compute(float (&sums)[N / 2], Place& place, int& stage, const uint8_t* panel,
                                        uint32_t chunks_at, const Barriers& barriers, int g, int t, int lane) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) sums[i] = 0.0f;
  uint32_t left[2][2][4];  // of two slabs, their halves
  Factors factors = factors_of(panel + stage * SLOT_BYTES, g);
  decode_slab(left[0], panel + stage * SLOT_BYTES, factors, 0, g, t);
#pragma unroll 1
  for (int block = 0; block < BLOCKS; block++) {
    const uint8_t* here = panel + stage * SLOT_BYTES;
    stage ^= 1;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const uint64 right = operand(chunks_at + place.slot * CHUNK_BYTES);
      const uint32_t before = barriers.empty + 8 * (place.slot == 0 ? CHUNK_SLOTS - 1 : place.slot - 1);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        begin_products();
        multiply<N>(sums, left[half][0], right + half * 64 / 16);
        multiply<N>(sums, left[half][1], right + (half * 64 + 32) / 16);
        commit_products();
        wait_for_products<1>();
        const int slab = 2 * c + half + 1;
        if (half == 0) {
          if (lane == 0 && (c > 0 || block > 0)) arrive(before);
          decode_slab(left[1], here, factors, slab, g, t);
        } else {
          place.advance();
          if (c < 3) decode_slab(left[0], here, factors, slab, g, t);
          if (c < 3 || block + 1 < BLOCKS) {
            wait(barriers.full + 8 * place.slot, place.parity);
            show_to_tensor_cores();
          }
          if (c == 3 && block + 1 < BLOCKS) {
            factors = factors_of(panel + stage * SLOT_BYTES, g);
            decode_slab(left[0], panel + stage * SLOT_BYTES, factors, 0, g, t);
          }
        }
      }
    }
  }
  wait_for_products<0>();
  hold(sums);
  if (lane == 0) arrive(barriers.empty + 8 * (place.slot == 0 ? CHUNK_SLOTS - 1 : place.slot - 1));
}

// Two warps that have gate and up of the same rows.
__device__ inline void wait_for_each_other(int couple) {
  asm volatile("bar.sync %0, 64;" ::"r"(couple + 1) : "memory");
}

// Of gate and up: sums is one of them for all pairs, and another warp has the other.
template <int N>
__device__ __forceinline__ void store_joined(float (&sums)[N / 2], const Info& info, const Results& results,
                                             float4* exchange, int g, int t) {
  constexpr int HALF = N / 4;
  const int warp = threadIdx.x / 32, side = warp / 2 % 2, own_couple = warp / 4 * 2 + warp % 2;
  const int couple = GROUP_PANELS / 2 * info.group + own_couple;
  const int place = 32 * (couple / 2) + 16 * (g / 2 % 2) + 8 * (g % 2) + 4 * (couple % 2) + 2 * (g / 4);
#pragma unroll
  for (int i = 0; i < HALF; i++) {  // up's warp keeps the second half
    const float first = sums[i], second = sums[HALF + i];
    sums[i] = side == 0 ? first : second, sums[HALF + i] = side == 0 ? second : first;
  }
#pragma unroll
  for (int from = 0; from < HALF; from += EXCHANGED) {
    wait_for_each_other(own_couple);
#pragma unroll
    for (int i = from; i < from + EXCHANGED && i < HALF; i += 4)
      exchange[(i - from) / 4 * THREADS + threadIdx.x] =
          make_float4(sums[HALF + i], sums[HALF + i + 1], sums[HALF + i + 2], sums[HALF + i + 3]);
    wait_for_each_other(own_couple);
#pragma unroll
    for (int i = from; i < from + EXCHANGED && i < HALF; i += 4) {
      const float4 four = exchange[(i - from) / 4 * THREADS + (threadIdx.x ^ 64)];
      const float given[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int column = 2 * i + side * (N / 2) + 2 * t + e;
        if (column >= info.live) continue;
        const int64 pair = info.pairs[column];
        float joined[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float kept = sums[i + 2 * r + e], other = given[2 * r + e];
          float gate = side == 0 ? kept : other, up = side == 0 ? other : kept;
          if constexpr (WEIGHTED) gate *= info.weights[column], up *= info.weights[column];
          if constexpr (BIASED) {
            const int64 here = int64(info.expert) * ROWS + 16 * couple + 2 * g + r;
            gate += results.bias[here], up += results.up_bias[here];
          }
          joined[r] = join<true>(gate, up);
        }
        *reinterpret_cast<uint32_t*>(results.out + pair * ROWS + place) = two_bfloat16(joined[0], joined[1]);
      }
    }
  }
}

template <int N>
__device__ __forceinline__ void store(const float (&sums)[N / 2], const Info& info, const Results& results, int g,
                                      int t) {
  const int place = 16 * (GROUP_PANELS * info.group + threadIdx.x / 32) + 2 * g;
  float2 bias = {};
  if constexpr (BIASED) bias = *reinterpret_cast<const float2*>(results.bias + int64(info.expert) * ROWS + place);
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    const int column = i / 2 * 8 + 2 * t + i % 2, at = i / 2 * 4 + i % 2;  // rows 2g and 2g + 1: at and at + 2
    if (column >= info.live) continue;
    const float weight = WEIGHTED ? info.weights[column] : 1.0f;
    *reinterpret_cast<uint32_t*>(results.out + int64(info.pairs[column]) * ROWS + place) =
        two_bfloat16((sums[at] + bias.x) * weight, (sums[at + 2] + bias.y) * weight);
  }
}

// Rows of pairs that nobody computes are zero.
__device__ inline void clear_skipped(const int64* ids, const int64* offsets, int pairs, uint16_t* out, int lane) {
  constexpr int ALL_WARPS = (THREADS + COPYING) / 32;
  for (int first = 32 * (blockIdx.x * ALL_WARPS + threadIdx.x / 32); first < pairs;
       first += 32 * ALL_WARPS * gridDim.x) {
    const int64 expert = first + lane < pairs ? ids[first + lane] : 0;
    uint32_t skipped = __ballot_sync(0xFFFFFFFF, first + lane < pairs && (expert < 0 || offsets[expert] < 0));
    for (; skipped != 0; skipped &= skipped - 1) {
      uint4* row = reinterpret_cast<uint4*>(out + int64(first + __ffs(skipped) - 1) * ROWS);
      for (int i = lane; i < ROWS / 8; i += 32) row[i] = make_uint4(0, 0, 0, 0);
    }
  }
}

// By the fewest columns of these that the pairs need.
template <int N, int... MORE>
__device__ __forceinline__ void run(const Info& info, const Results& results, float4* exchange, Place& place,
                                    int& stage, const uint8_t* panel, uint32_t chunks_at, const Barriers& barriers,
                                    int g, int t, int lane) {
  if constexpr (sizeof...(MORE) > 0) {
    if (info.live > N)
      return run<MORE...>(info, results, exchange, place, stage, panel, chunks_at, barriers, g, t, lane);
  }
  float sums[N / 2];
  compute<N>(sums, place, stage, panel, chunks_at, barriers, g, t, lane);
  if constexpr (activation == NONE)
    store<N>(sums, info, results, g, t);
  else
    store_joined<N>(sums, info, results, exchange, g, t);
}

extern "C" __global__ void __launch_bounds__(THREADS + COPYING, 1)
    multiply_many(const uint8_t* pool, const int64* offsets, const int64* ids, const uint16_t* x,
                  const float* pair_weights, const float* bias, const float* up_bias, uint16_t* out,
                  const int* sorted_pairs, const int* starts, const int* counts, int* counter, int pairs, int slots,
                  int start) {
  extern __shared__ __align__(1024) uint8_t memory[];  // chunks, panels, what is exchanged
  __shared__ int ends[EXPERTS], next_job[2];
  __shared__ Info infos[INFOS];
  __shared__ __align__(8) unsigned long long barrier[2 * CHUNK_SLOTS + INFOS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint8_t* panels = memory + CHUNK_SLOTS * CHUNK_BYTES;
  const uint32_t chunks_at = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const uint32_t first = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
  const Barriers barriers = {first, first + 8 * CHUNK_SLOTS, first + 16 * CHUNK_SLOTS};

  if (threadIdx.x == 0) {
    for (int i = 0; i < CHUNK_SLOTS; i++) {
      begin_barrier(barriers.full + 8 * i, COPYING);
      begin_barrier(barriers.empty + 8 * i, WARPS);
    }
    for (int i = 0; i < INFOS; i++) begin_barrier(barriers.listed + 8 * i, COPYING);
  }
  if (warp == 0) count_lists(ends, counts, lane);
  if constexpr (activation == NONE) clear_skipped(ids, offsets, pairs, out, lane);
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    copy_lists(pool, offsets, x, pair_weights, sorted_pairs, starts, counts, slots, start, ends, counter, next_job,
               infos, chunks_at, chunks_at + CHUNK_SLOTS * CHUNK_BYTES, barriers);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
  const Results results = {bias, up_bias, out};
  float4* exchange = reinterpret_cast<float4*>(panels + PANELS_BYTES);
  if (warp >= WARPS / 2) __nanosleep(DELAY);
  Place place = {0, 0};
  int stage = 0, number = 0;
  uint32_t parity = 0;
  while (true) {
    wait(barriers.listed + 8 * number, parity);
    if (infos[number].live == 0) break;
    wait(barriers.full + 8 * place.slot, place.parity);
    show_to_tensor_cores();
    run<WIDTHS>(infos[number], results, exchange, place, stage, panels + warp * STAGES * SLOT_BYTES, chunks_at,
                barriers, g, t, lane);
    if (++number == INFOS) number = 0, parity ^= 1;
  }
}
