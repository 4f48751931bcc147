// Products of packed experts with int8 activations on tensor cores: see expert_matrices.py, which compiles this file.
//
// A warp multiplies two panels of 16 rows at once, by up to PAIRS pairs of one expert: gate and up of the same rows, or
// neighbours of down. It copies their superblocks to a ring in shared memory, some ahead of their use.

#include "activation.cuh"
#include "panel_products.cuh"

static_assert(ROWS % 32 == 0);
constexpr int COUPLES = ROWS / (activation == NONE ? 32 : 16);  // of panels of a warp
// A job is a group of couples of a list. With RUNS, each program has a run of jobs of all experts. Otherwise program
// [x, y] has group x of all lists of expert y.
constexpr int GROUPS = RUNS ? (COUPLES + WARPS - 1) / WARPS : 1;  // of a list, that a program can have
constexpr int HELD = RUNS ? EXPERTS : 1;                          // experts
constexpr int STAGE_BYTES = 2 * SLOT_BYTES;

// Wait until the kernel before this one has ended, where it is launched early; then let the next one begin.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait for the warp that has the other rows of a slab.
__device__ inline void sync_slab(int warp) { asm volatile("bar.sync %0, 64;" ::"r"(1 + warp / 2) : "memory"); }

// Multiply what the ring brings by LIVE quads. `take()` waits for two superblocks, and `release()` begins to copy
// others in their place.
template <int LIVE, typename Take, typename Release>
__device__ inline void multiply(Values values[2], int quads, const uint8_t* x_codes, const float* x_scales,
                                const float* x_sums, int g, int t, const Take& take, const Release& release) {
  constexpr int FEWER = LIVE - (PAIRS > 8 ? 2 : 1);
  if constexpr (FEWER > 0) {
    if (quads <= FEWER) return multiply<FEWER>(values, quads, x_codes, x_scales, x_sums, g, t, take, release);
  }
#pragma unroll 1
  for (int i = 0; i < BLOCKS; i++) {
    const uint8_t *here = take(), *const blocks[2] = {here, here + SLOT_BYTES};
    const uint8_t* codes = x_codes + i * 8 * TILES * 256;
    const float *scales = x_scales + i * 8 * PAIRS, *sums = x_sums + i * PAIRS * LINES;
    if (LAST_SLABS == 8 || i < BLOCKS - 1) {
      add_codes<8, LIVE>(values, blocks, codes, scales, g, t);
      if constexpr (MINIMUMS) subtract_minimums<8, LIVE>(values, blocks, sums, g, t);
    } else {
      add_codes<LAST_SLABS, LIVE>(values, blocks, codes, scales, g, t);
      if constexpr (MINIMUMS) subtract_minimums<LAST_SLABS, LIVE>(values, blocks, sums, g, t);
    }
    release();
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, PROGRAMS)
    multiply_experts(const uint8_t* pool, const int64* offsets, const int64* ids, const uint8_t* codes,
                     const float* scales, const int* sums, const float* pair_weights, const float* bias,
                     const float* up_bias, void* out, float* out_scales, int* out_sums, const int* sorted_pairs,
                     const int* starts, const int* counts, int pairs, int slots, int start) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ int64 records[HELD];
  __shared__ int starts_of[HELD], counts_of[HELD], ends[HELD];
  __shared__ int known_pairs[KNOWN_PAIRS], lists_of[(HELD + 31) / 32];
  __shared__ int pair_of[PAIRS], x_rows[PAIRS];
  __shared__ float weight_of[PAIRS];
  __shared__ float largest_of[WARPS][PAIRS], broken_of[WARPS][PAIRS];
  __shared__ int sum_of[WARPS][PAIRS];
  uint8_t* x_codes = memory;
  float* x_scales = reinterpret_cast<float*>(memory + CODE_BYTES);
  float* x_sums = reinterpret_cast<float*>(memory + CODE_BYTES + SCALE_BYTES);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint8_t* ring = memory + CODE_BYTES + SCALE_BYTES + SUM_BYTES + warp * STAGES * STAGE_BYTES;

  // Rows of down come from the kernel before it. What else is read was there when that one let this one begin.
  if constexpr (activation != NONE) wait_for_previous();
  const int first_expert = RUNS ? 0 : blockIdx.y;
  for (int i = threadIdx.x; i < HELD; i += 32 * WARPS) {
    counts_of[i] = __ldcg(counts + first_expert + i), starts_of[i] = __ldcg(starts + first_expert + i);
    records[i] = offsets[first_expert + i];
    if (!RUNS) ends[i] = (counts_of[i] + PAIRS - 1) / PAIRS;
  }
  // Few sorted pairs are loaded beside what says where each list begins, not after it.
  const bool are_known = RUNS && pairs <= KNOWN_PAIRS;
  if (are_known)
    for (int i = threadIdx.x; i < pairs; i += 32 * WARPS) known_pairs[i] = __ldcg(sorted_pairs + i);
  __syncthreads();
  if constexpr (RUNS) {  // ends: of the lists of an expert, counted over all experts
    for (int first = 32 * warp; first < HELD; first += 32 * WARPS) {
      const int expert = first + lane;
      int end = expert < HELD ? (counts_of[expert] + PAIRS - 1) / PAIRS : 0;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFF, end, distance);
        if (lane >= distance) end += other;
      }
      if (expert < HELD) ends[expert] = end;
      if (lane == 31) lists_of[first / 32] = end;
    }
    __syncthreads();
    for (int expert = 32 + threadIdx.x; expert < HELD; expert += 32 * WARPS) {
      int before = 0;
      for (int i = 0; i < expert / 32; i++) before += lists_of[i];
      ends[expert] += before;
    }
    __syncthreads();
  }
  const auto expert_of = [&](int list) {
    int first = 0, last = HELD - 1;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (ends[middle] > list)
        last = middle;
      else
        first = middle + 1;
    }
    return first;
  };

  // Programs have runs of jobs, and warps copy the job that follows without a pause.
  const int lists = ends[HELD - 1], jobs = lists * GROUPS, programs = gridDim.x;
  int first_job = RUNS ? int64(blockIdx.x) * jobs / programs : 0;
  int last_job = RUNS ? int64(blockIdx.x + 1) * jobs / programs : jobs;
  if (RUNS && lists <= programs && programs < 2 * lists && GROUPS <= (jobs + programs - 1) / programs) {
    // Some have a list of their own, and two share each of the others. So none has rows of x of two lists, and the
    // longest run is as long as before.
    const int list = int64(blockIdx.x) * lists / programs, first = (list * programs + lists - 1) / lists;
    const int sharing = ((list + 1) * programs + lists - 1) / lists - first, part = blockIdx.x - first;
    first_job = list * GROUPS + part * GROUPS / sharing, last_job = list * GROUPS + (part + 1) * GROUPS / sharing;
  }
  const auto couple_of = [&](int job) { return (RUNS ? job % GROUPS : blockIdx.x) * WARPS + warp; };
  constexpr int LAST_BYTES = PANEL_BYTES - (BLOCKS - 1) * SUPERBLOCK_BYTES;
  const uint32_t ring_at_lane = static_cast<uint32_t>(__cvta_generic_to_shared(ring)) + place_of_byte(16 * lane);
  int job_ahead = first_job, block = 0, slot = 0;  // of the next superblocks to copy
  int list_ahead = -1;
  const uint8_t *record = nullptr, *from = nullptr;
  const auto seek = [&] {  // the next job in which this warp has panels
    while (job_ahead < last_job && couple_of(job_ahead) >= COUPLES) job_ahead++;
    if (job_ahead >= last_job) return;
    if (job_ahead / GROUPS != list_ahead) {
      list_ahead = job_ahead / GROUPS;
      record = pool + records[expert_of(list_ahead)] + start + 16 * lane;
    }
    from = record + int64(couple_of(job_ahead)) * 2 * PANEL_BYTES;
  };
  const auto fetch = [&] {
    if (job_ahead < last_job) {
      const uint32_t to = ring_at_lane + slot * STAGE_BYTES;
      const bool is_whole = LAST_BYTES == SUPERBLOCK_BYTES || block < BLOCKS - 1;
      for (int side = 0; side < 2; side++)
        if (is_whole)
          copy_block<SUPERBLOCK_BYTES>(to + side * SLOT_BYTES, from + side * PANEL_BYTES, lane);
        else
          copy_block<LAST_BYTES>(to + side * SLOT_BYTES, from + side * PANEL_BYTES, lane);
      from += SUPERBLOCK_BYTES;
      slot = slot == STAGES - 1 ? 0 : slot + 1;
      if (++block == BLOCKS) block = 0, job_ahead++, seek();
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  seek();
  for (int i = 0; i < STAGES; i++) fetch();
  int used = 0;  // the ring's slot of the next superblocks to multiply
  const auto take = [&] {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncwarp();
    return ring + used * STAGE_BYTES;
  };
  const auto release = [&] {
    used = used == STAGES - 1 ? 0 : used + 1;
    __syncwarp();
    fetch();
  };

  int list = -1, expert = 0, live = 0;
  const auto learn = [&](int job) {  // the pairs of its list
    list = job / GROUPS, expert = expert_of(list);
    const int done = (list - (expert > 0 ? ends[expert - 1] : 0)) * PAIRS;
    live = min(PAIRS, counts_of[expert] - done);
    if (threadIdx.x < live) {
      const int at = starts_of[expert] + done + threadIdx.x;
      const int pair = are_known ? known_pairs[at] : __ldcg(sorted_pairs + at);
      pair_of[threadIdx.x] = pair, x_rows[threadIdx.x] = pair / slots;
      weight_of[threadIdx.x] = WEIGHTED ? __ldcg(pair_weights + pair) : 1.0f;
    }
  };
  if (first_job < last_job) learn(first_job);

  if constexpr (activation == NONE) {
    const int program = blockIdx.y * gridDim.x + blockIdx.x, programs = gridDim.x * gridDim.y;
    int64 wanted = program < pairs ? ids[program] : 0;
    wait_for_previous();
    for (int pair = program; pair < pairs;) {  // rows of pairs that nobody computes are zero
      if (wanted < 0 || (RUNS ? records[wanted] : offsets[wanted]) < 0)
        for (int row = threadIdx.x; row < ROWS; row += 32 * WARPS)
          static_cast<float*>(out)[int64(pair) * ROWS + row] = 0.0f;
      pair += programs;
      if (pair < pairs) wanted = ids[pair];
    }
  }

  for (int job = first_job; job < last_job; job++) {
    const bool is_next = job / GROUPS != list;
    if (is_next) {
      __syncthreads();  // all have multiplied by the rows before
      learn(job);
    }
    if (is_next || job == first_job) {
      __syncthreads();
      stage_rows(x_codes, x_scales, x_sums, x_rows, live, codes, scales, sums);
      __syncthreads();
    }
    const int couple = couple_of(job);
    if (couple >= COUPLES) continue;
    float values[2][QUADS][2] = {};
    multiply<QUADS>(values, (live + 3) / 4, x_codes, x_scales, x_sums, g, t, take, release);
    if constexpr (activation == NONE) {
#pragma unroll
      for (int quad = 0; quad < QUADS; quad++) {
        const int column = 4 * quad + t;
        if (column >= live) continue;
        const int64 pair = pair_of[column];
        const float weight = weight_of[column];
#pragma unroll
        for (int side = 0; side < 2; side++) {
          const int row = 32 * couple + 16 * side + 2 * g;
          float2 added = {};
          if constexpr (BIASED)
            added = *reinterpret_cast<const float2*>(bias + int64(first_expert + expert) * ROWS + row);
          const float (&sum)[2] = values[side][quad];
          *reinterpret_cast<float2*>(static_cast<float*>(out) + pair * ROWS + row) =
              make_float2((sum[0] + added.x) * weight, (sum[1] + added.y) * weight);
        }
      }
    } else {  // two warps have the rows of a slab
      const int row = 16 * couple + 2 * g;
      float joined[QUADS][2];
#pragma unroll
      for (int quad = 0; quad < QUADS; quad++) {
        if (4 * quad >= live) continue;
        const int column = 4 * quad + t;
        const float weight = weight_of[min(column, live - 1)];
        float largest = 0.0f, broken = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int64 at = int64(first_expert + expert) * ROWS + row + r;
          const float gate = values[0][quad][r] * weight + (BIASED ? bias[at] : 0.0f);
          const float up = values[1][quad][r] * weight + (BIASED ? up_bias[at] : 0.0f);
          joined[quad][r] = join(gate, up);
          largest = fmaxf(largest, fabsf(joined[quad][r])), broken += joined[quad][r] * 0.0f;
        }
#pragma unroll
        for (int other = 4; other < 32; other *= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, other));
          broken += __shfl_xor_sync(0xFFFFFFFF, broken, other);
        }
        if (g == 0) largest_of[warp][column] = largest, broken_of[warp][column] = broken;
      }
      sync_slab(warp);
#pragma unroll
      for (int quad = 0; quad < QUADS; quad++) {
        if (4 * quad >= live) continue;
        const int column = 4 * quad + t;
        const float largest = fmaxf(largest_of[warp][column], largest_of[warp ^ 1][column]);
        const float broken = broken_of[warp][column] + broken_of[warp ^ 1][column];
        const float inverse = largest > 0.0f ? __fdiv_rn(127.0f, largest) : 0.0f;
        int code[2], sum = 0;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          code[r] = broken == 0.0f ? __float2int_rn(joined[quad][r] * inverse) : 0;
          sum += code[r];
        }
#pragma unroll
        for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, other);
        if (g == 0) sum_of[warp][column] = sum;
        if (column < live) {
          const int64 pair = pair_of[column];
          *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(out) + pair * ROWS + row) =
              (code[0] & 255) | (code[1] & 255) << 8;
          if (g == 0 && warp % 2 == 0)
            out_scales[pair * (ROWS / 32) + couple / 2] = __fdiv_rn(largest, 127.0f) + broken;
        }
      }
      sync_slab(warp);
      if (warp % 2 == 0)
        for (int column = lane; column < live; column += 32)
          out_sums[int64(pair_of[column]) * (ROWS / 32) + couple / 2] =
              sum_of[warp][column] + 65536 * sum_of[warp + 1][column];
    }
  }
}
