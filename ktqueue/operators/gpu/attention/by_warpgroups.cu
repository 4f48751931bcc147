// Attention of prompts over pages, for Hopper: see by_warpgroups.py, which compiles this file.
//
// A program takes tiles of 128 rows, which are tokens times the query heads of a key/value head, one after the other.
// Four warps copy: queries, then blocks of keys and values, through rings in shared memory. Two warpgroups have 64 rows
// each. They multiply queries by a block's keys (PTX ISA, "wgmma.mma_async"), make weights of the scores in registers,
// and these are the left operand of its values. The next block's scores begin before this block's values.
//
// Lane 4g + t of a warp has of 16 rows g and g + 8, and of each eight keys or columns 2t and 2t + 1.

#include "weights.cuh"

constexpr int TILE = 128;       // rows
constexpr int STAGES = 2;       // blocks of keys in shared memory, and of values
constexpr int QUERY_SLOTS = 2;  // tiles of queries in shared memory
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int TOKENS = TILE / GROUP;   // of a tile
constexpr int PANELS = HEAD_DIM / 64;  // of 64 columns
constexpr int PARTS = HEAD_DIM / 8;    // of 16 bytes
constexpr int PANEL = 128 * 128;       // bytes
constexpr int OPERAND = PANELS * PANEL;
constexpr int BOX = PAGE_SIZE < BLOCK ? PAGE_SIZE : BLOCK;  // keys that are copied at once
constexpr int BOXES = BLOCK / BOX;
constexpr int WARPS = 4;  // that copy
constexpr int COPYING = 32 * WARPS, MULTIPLYING = 256;
static_assert(BLOCK % BOX == 0 && PAGE_SIZE % BOX == 0 && BOX % 8 == 0 && HEAD_DIM % 64 == 0 && GROUP <= TILE);

struct Job {
  int row, token, live, position;  // token: the first one in the batch; live: tokens; position: of the first one
  int head, first, end;            // of keys and values; first: block; end: of the keys that are seen
};

struct Tables {
  const int *tiles, *query_starts, *page_starts, *pages, *contexts;
};

struct Barriers {  // addresses of the first of each
  uint32_t key_full, key_empty, value_full, value_empty, query_full, query_empty;
};

struct Ring {
  int number;  // of blocks so far
  __device__ int stage() const { return number % STAGES; }
  __device__ uint32_t parity() const { return number / STAGES; }
};

// Where 16 bytes of a row lie in an operand.
__device__ inline uint32_t place_of(int row, int part) {
  return part / 8 * PANEL + row * 128 + ((part % 8 ^ row % 8) << 4);
}

// The next tile of a head: those with the most keys come first. `live` is 0 if there is none left. The last program
// that finds none sets the counter back. By one warp.
__device__ inline Job next_job(const Tables& tables, int* counter, int jobs, int lane) {
  for (;;) {
    int number = 0;
    if (lane == 0) {
      number = atomicAdd(counter, 1);
      if (number == jobs + int(gridDim.x) - 1) *counter = 0;
    }
    number = __shfl_sync(0xFFFFFFFF, number, 0);
    if (number >= jobs) return {};
    Job job;
    job.head = number % KV_HEADS;
    const int tile = number / KV_HEADS;
    job.row = tables.tiles[tile * 2];
    const int offset = tables.tiles[tile * 2 + 1];
    const int begin = tables.query_starts[job.row], tokens = tables.query_starts[job.row + 1] - begin;
    const int context = tables.contexts[job.row];
    job.token = begin + offset, job.live = min(TOKENS, tokens - offset), job.position = context - tokens + offset;
    job.end = job.position + job.live;
    if (job.live <= 0) continue;  // it pads a captured step
    int lowest = 0;
    if constexpr (WINDOW > 0) lowest = max(job.position + 1 - WINDOW, 0);
    if constexpr (CHUNK > 0) lowest = max(lowest, job.position / CHUNK * CHUNK);
    job.first = lowest / BLOCK;
    return job;
  }
}

// Copy the job and its queries to their place in shared memory.
__device__ inline void announce(const Job& job, Job* place, const uint16_t* query, uint32_t to, uint32_t full,
                                int thread) {
  if (job.live > 0) {
    const uint16_t* from = query + (int64(job.token) * HEADS + job.head * GROUP) * HEAD_DIM;
#pragma unroll 2
    for (int i = thread; i < TILE * PARTS; i += COPYING) {
      const int row = i / PARTS, part = i % PARTS, token = row / GROUP;
      const bool exists = token < job.live;
      const int64 here = exists ? (int64(token) * HEADS + row % GROUP) * HEAD_DIM + part * 8 : 0;
      copy(to + place_of(row, part), from + here, exists);
    }
  }
  arrive_with_copies(full);
  if (thread == 0) {
    *place = job;
    arrive(full);
  }
}

// Copy values of a page that is not full. Those behind the end would be multiplied by 0, but may be no numbers, as
// another row left them. So they are zeros.
__device__ inline void copy_values(uint32_t to, const uint16_t* from, int first, int live, int slot_stride, int lane) {
#pragma unroll 1
  for (int i = lane; i < BOX * PARTS; i += 32) {
    const int row = i / PARTS, part = i % PARTS;
    uint4 eight = {};
    if (row < live) eight = *reinterpret_cast<const uint4*>(from + int64(row) * slot_stride + part * 8);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + place_of(first + row, part)), "r"(eight.x),
                 "r"(eight.y), "r"(eight.z), "r"(eight.w)
                 : "memory");
  }
  show_to_tensor_cores();
  __syncwarp();
}

// Copy a block of keys or values. page: lane b's is that of the block's box b. Boxes behind the row's end are zeros.
// One warp alone begins too few copies: 1,425 us instead of 830 at 8,192 tokens.
template <bool ARE_VALUES>
__device__ __forceinline__ void copy_block(uint32_t to, const Map* map, const uint16_t* values, uint32_t full, int page,
                                           int block, int end, int head, int page_stride, int slot_stride, int thread) {
  const int lane = thread % 32, warp = thread / 32, in_page = PAGE_SIZE > BLOCK ? block * BLOCK % PAGE_SIZE : 0;
  const int cut = ARE_VALUES && end % BOX != 0 && end / BLOCK == block ? end % BLOCK / BOX : -1;
  const bool has_cut = cut >= 0 && cut % WARPS == warp;
  if (has_cut) {
    const int64 from = int64(__shfl_sync(0xFFFFFFFF, page, cut)) * page_stride + int64(in_page) * slot_stride;
    copy_values(to, values + from + head * HEAD_DIM, cut * BOX, end % BOX, slot_stride, lane);
  }
  const int own = (BOXES - warp + WARPS - 1) / WARPS - has_cut;
  if (lane == 0) arrive_expecting(full, own * BOX * HEAD_DIM * 2);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < (BOXES + WARPS - 1) / WARPS; i++) {
    const int box = i * WARPS + warp;
    const int from = __shfl_sync(0xFFFFFFFF, page, box);
    if (lane == 0 && box != cut && box < BOXES)
#pragma unroll
      for (int panel = 0; panel < PANELS; panel++)
        copy_box(to + panel * PANEL + box * BOX * 128, map, full, panel * 64, head, in_page, from);
  }
}

__device__ __forceinline__ void copy_jobs(const Map* key_map, const Map* value_map, const uint16_t* query,
                                          const uint16_t* values, const Tables& tables, int* counter, int all,
                                          Job* places, Job& taken, uint32_t queries_at, uint32_t keys_at,
                                          uint32_t values_at, const Barriers& barriers, int page_stride,
                                          int slot_stride, int outside) {
  const int thread = threadIdx.x - MULTIPLYING, lane = thread % 32;
  const auto next = [&]() {
    if (thread < 32) {
      const Job found = next_job(tables, counter, all, lane);
      if (lane == 0) taken = found;
    }
    asm volatile("bar.sync 1, 128;" ::: "memory");
    const Job job = taken;
    asm volatile("bar.sync 1, 128;" ::: "memory");
    return job;
  };
  Ring ring = {0};
  Job job = next();
  for (int number = 0;; number++) {
    const int place = number % QUERY_SLOTS;
    wait_for_turn(barriers.query_empty + 8 * place, number / QUERY_SLOTS + 1);
    announce(job, places + place, query, queries_at + place * OPERAND, barriers.query_full + 8 * place, thread);
    if (job.live == 0) break;
    const Job later = next();
    const int end = tables.contexts[job.row], blocks = (job.end + BLOCK - 1) / BLOCK;
    const int* pages = tables.pages + tables.page_starts[job.row];
    const auto page_of = [&](int block) {  // of box `lane`. One that does not exist is copied as zeros.
      const int key = block * BLOCK + lane * BOX;
      return lane < BOXES && key < end ? pages[key / PAGE_SIZE] : outside;
    };
    int page = page_of(job.first);
#pragma unroll 1
    for (int block = job.first; block < blocks; block++) {
      const int now = page, at = ring.stage() * OPERAND, barrier = 8 * ring.stage();
      if (block + 1 < blocks) page = page_of(block + 1);
      wait_for_turn(barriers.key_empty + barrier, ring.parity() + 1);
      copy_block<false>(keys_at + at, key_map, values, barriers.key_full + barrier, now, block, end, job.head,
                        page_stride, slot_stride, thread);
      wait_for_turn(barriers.value_empty + barrier, ring.parity() + 1);
      copy_block<true>(values_at + at, value_map, values, barriers.value_full + barrier, now, block, end, job.head,
                       page_stride, slot_stride, thread);
      ring.number++;
    }
    job = later;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void begin_scores(float (&scores)[BLOCK / 2], uint64 queries, uint64 keys) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++) {
    const int from = (i / 4 * PANEL + i % 4 * 32) / 16;
    if (i == 0)
      multiply_keys<false>(scores, queries, keys);
    else
      multiply_keys<true>(scores, queries + from, keys + from);
  }
  commit_products();
}
__device__ __forceinline__ void begin_values(float (&sums)[HEAD_DIM / 2], const uint32_t (&weights)[BLOCK / 4],
                                             uint64 values) {
#pragma unroll
  for (int i = 0; i < BLOCK / 16; i++) multiply_values(sums, weights + 4 * i, values + i * 16 * 128 / 16);
  commit_products();
}

__device__ __forceinline__ void store(const float (&sums)[HEAD_DIM / 2], const Rows& rows, const Job& job, int first,
                                      uint16_t* out, int lane) {
  const int t = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float total = rows.total[r];
    total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
    total += __shfl_xor_sync(0xFFFFFFFF, total, 2);
    const float share = 1.0f / total;
    const int row = first + lane / 4 + 8 * r, token = row / GROUP;
    uint16_t* to = out + (int64(job.token + token) * HEADS + job.head * GROUP + row % GROUP) * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i += 2) {  // of two eights of columns, even lanes store the first
      const uint32_t one = rounded(sums[4 * i + 2 * r] * share, sums[4 * i + 2 * r + 1] * share);
      const uint32_t two = rounded(sums[4 * i + 4 + 2 * r] * share, sums[4 * i + 5 + 2 * r] * share);
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, t % 2 ? one : two, 1);
      const uint2 four = t % 2 ? make_uint2(other, two) : make_uint2(one, other);
      if (token < job.live) *reinterpret_cast<uint2*>(to + 8 * (i + t % 2) + t / 2 * 4) = four;
    }
  }
}

__device__ __forceinline__ void multiply_jobs(const Job* jobs, const float* sinks, uint16_t* out, uint32_t queries,
                                              uint64 keys, uint64 values, const Barriers& barriers) {
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);  // so that the compiler knows that lanes agree
  const int lane = threadIdx.x % 32, t = lane % 4, side = warp / 4, first_row = 16 * warp;
  Ring key = {0}, value = {0};
  for (int number = 0;; number++) {
    const int place = number % QUERY_SLOTS;
    wait_for_turn(barriers.query_full + 8 * place, number / QUERY_SLOTS);
    show_to_tensor_cores();
    const Job job = jobs[place];
    if (job.live == 0) break;
    Rows rows;
    float sums[HEAD_DIM / 2], scores[BLOCK / 2], shrink[2];
    uint32_t weights[BLOCK / 4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = first_row + lane / 4 + 8 * r;
      rows.position[r] = job.position + row / GROUP;
      rows.level[r] = LOWEST, rows.total[r] = 0.0f;
      if constexpr (HAS_SINKS) {  // a key without a value comes first
        rows.level[r] = sinks[job.head * GROUP + row % GROUP] * LOG2_E;
        rows.total[r] = t == 0 ? 1.0f : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) sums[i] = 0.0f;
    const uint64 own = operand(queries + place * OPERAND + side * 64 * 128);
    const int blocks = (job.end + BLOCK - 1) / BLOCK, highest = job.position + job.live - 1;
    const auto is_masked = [&](int block) {
      bool masked = block * BLOCK + BLOCK > job.position + 1;
      if constexpr (WINDOW > 0) masked = masked || block * BLOCK < highest + 1 - WINDOW;
      if constexpr (CHUNK > 0) masked = masked || block * BLOCK < highest / CHUNK * CHUNK;
      return masked;
    };
    const auto round_weights = [&]() {  // in the order of a left operand
#pragma unroll
      for (int i = 0; i < BLOCK / 4; i++) weights[i] = rounded(scores[2 * i], scores[2 * i + 1]);
    };

    wait_for_turn(barriers.key_full + 8 * key.stage(), key.parity());
    hold(scores);
    begin_products();
    begin_scores(scores, own, keys + key.stage() * (OPERAND / 16));
    wait_for_products<0>();
    hold(scores);
    if (lane == 0) arrive(barriers.key_empty + 8 * key.stage());
    key.number++;
    weigh(scores, rows, shrink, job.first * BLOCK, is_masked(job.first), t);
    round_weights();
#pragma unroll 1
    for (int block = job.first + 1; block < blocks; block++) {
      wait_for_turn(barriers.key_full + 8 * key.stage(), key.parity());
      hold(scores);
      hold(sums);
      begin_products();
      begin_scores(scores, own, keys + key.stage() * (OPERAND / 16));
      wait_for_turn(barriers.value_full + 8 * value.stage(), value.parity());
      begin_products();
      begin_values(sums, weights, values + value.stage() * (OPERAND / 16));
      wait_for_products<1>();
      hold(scores);
      if (lane == 0) arrive(barriers.key_empty + 8 * key.stage());
      key.number++;
      const bool is_new = weigh(scores, rows, shrink, block * BLOCK, is_masked(block), t);
      wait_for_products<0>();
      hold(sums);
      if (lane == 0) arrive(barriers.value_empty + 8 * value.stage());
      value.number++;
      round_weights();
      if (__any_sync(0xFFFFFFFF, is_new)) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) sums[i] *= shrink[i / 2 % 2];
      }
    }
    if (lane == 0) arrive(barriers.query_empty + 8 * place);
    wait_for_turn(barriers.value_full + 8 * value.stage(), value.parity());
    hold(sums);
    begin_products();
    begin_values(sums, weights, values + value.stage() * (OPERAND / 16));
    wait_for_products<0>();
    hold(sums);
    if (lane == 0) arrive(barriers.value_empty + 8 * value.stage());
    value.number++;
    store(sums, rows, job, first_row, out, lane);
  }
}

// Rows of out from `first` on are zeros.
__device__ inline void clear_rows(uint16_t* out, int first, int tokens) {
  for (int token = first + blockIdx.x; token < tokens; token += gridDim.x) {
    uint4* row = reinterpret_cast<uint4*>(out + int64(token) * HEADS * HEAD_DIM);
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM / 8; i += MULTIPLYING + COPYING) row[i] = make_uint4(0, 0, 0, 0);
  }
}

extern "C" __global__ void __launch_bounds__(MULTIPLYING + COPYING, 1)
    attend_to_prompts(const __grid_constant__ Map key_map, const __grid_constant__ Map value_map, const uint16_t* query,
                      const uint16_t* values, const int* tiles, const int* query_starts, const int* page_starts,
                      const int* pages, const int* contexts, const float* sinks, uint16_t* out, int* counter, int jobs,
                      int page_stride, int slot_stride, int outside, int rows, int tokens) {
  extern __shared__ __align__(1024) uint8_t memory[];  // queries, keys, values
  __shared__ Job places[QUERY_SLOTS], taken;
  __shared__ __align__(8) uint64 barrier[4 * STAGES + 2 * QUERY_SLOTS];
  const uint32_t queries_at = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const uint32_t keys_at = queries_at + QUERY_SLOTS * OPERAND, values_at = keys_at + STAGES * OPERAND;
  const uint32_t first = static_cast<uint32_t>(__cvta_generic_to_shared(barrier)), queries = first + 32 * STAGES;
  const Barriers barriers = {first,   first + 8 * STAGES,       first + 16 * STAGES, first + 24 * STAGES,
                             queries, queries + 8 * QUERY_SLOTS};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      begin_barrier(barriers.key_full + 8 * i, WARPS);
      begin_barrier(barriers.value_full + 8 * i, WARPS);
      begin_barrier(barriers.key_empty + 8 * i, MULTIPLYING / 32);
      begin_barrier(barriers.value_empty + 8 * i, MULTIPLYING / 32);
    }
    for (int i = 0; i < QUERY_SLOTS; i++) {
      begin_barrier(barriers.query_full + 8 * i, COPYING + 1);
      begin_barrier(barriers.query_empty + 8 * i, MULTIPLYING / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  clear_rows(out, query_starts[rows], tokens);
  __syncthreads();
  if (threadIdx.x >= MULTIPLYING) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    copy_jobs(&key_map, &value_map, query, values, {tiles, query_starts, page_starts, pages, contexts}, counter, jobs,
              places, taken, queries_at, keys_at, values_at, barriers, page_stride, slot_stride, outside);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    multiply_jobs(places, sinks, out, queries_at, operand(keys_at), operand(values_at, PANEL), barriers);
  }
}
