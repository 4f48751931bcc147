// Products of packed experts with int8 activations on tensor cores: see expert_matrices.py, which compiles this file.
//
// A warp multiplies two panels of 16 rows at once, by up to PAIRS pairs of one expert: gate and up of the same rows, or
// neighbours of down. It takes one slab of 32 columns at a time: mma.m16n8k32 (PTX ISA, "Matrix Fragments for
// mma.m16n8k32"). Lane 4g + t of a warp has the rows g and g + 8 of the left operand, and of each four columns from 4t
// and from 16 + 4t. Columns are multiplied in any order, if both operands have the same, and rows may be stored where
// they belong. So a lane takes rows and columns that lie together in the packed planes: see superblock.cuh.
//
// The right operand has eight *places*. Of a lane's two results in a row, one is in an even place and one in an odd
// place. Four pairs are a *quad*. By HALVES, the places are the two halves of a quad's slabs, each with zeros in place
// of the other half. Otherwise they are two quads, so that a lane leaves out the second one if nobody needs it.
//
// Minimums are a product too: of all slabs of a superblock at once, with the sums of x over these slabs. It is that of
// tf32, which has 11 significant bits. So sums are split into two numbers, and their product has 22.
//
// Each warp copies the superblocks of its panels to a ring in shared memory, some ahead of their use. Sums begin at
// 1.5 * 2^23 as the bits of a float, which makes them floats without a conversion.

#include "superblock.cuh"

enum Activation { NONE, silu, gelu, gelu_tanh, swiglu_clamped };

constexpr Activation activation = ACTIVATION;  // NONE: one matrix, otherwise gate and up
constexpr int SLABS = COLUMNS / 32;
constexpr int BLOCKS = (SLABS + 7) / 8;
constexpr int LAST_SLABS = SLABS - 8 * (BLOCKS - 1);
constexpr int QUADS = PAIRS / 4;
constexpr int TILES = HALVES ? QUADS : QUADS / 2;  // of eight places
static_assert(ROWS % 32 == 0 && COLUMNS % 32 == 0);
constexpr int COUPLES = ROWS / (activation == NONE ? 32 : 16);  // of panels of a warp
constexpr int GROUPS = (COUPLES + WARPS - 1) / WARPS;           // of couples of a program
constexpr uint32_t FIRST_SUM = 0x4B400000;
constexpr float FIRST_SUM_AS_FLOAT = 12582912.0f;

// Shared memory: codes of x [SLABS][8 * TILES places][32], their scales [SLABS][PAIRS], sums for minimums
// [BLOCKS][PAIRS][LINES], and the rings of all warps.
constexpr int LINES = 8 * PARTS;
constexpr int CODE_BYTES = SLABS * TILES * 8 * 32;
constexpr int SCALE_BYTES = SLABS * PAIRS * 4;
constexpr int SUM_BYTES = MINIMUMS ? BLOCKS * PAIRS * LINES * 4 : 0;
constexpr int SLOT_BYTES = (SUPERBLOCK_BYTES + 127) / 128 * 128;
constexpr int STAGE_BYTES = 2 * SLOT_BYTES;

// The first place of a pair. By HALVES, that of its other half follows.
__device__ inline int place_of(int pair) { return HALVES ? 2 * pair : pair / 8 * 8 + pair % 4 * 2 + pair / 4 % 2; }

__device__ inline void multiply_codes(int sums[4], const uint32_t codes[4], uint2 x) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
      : "r"(codes[0]), "r"(codes[1]), "r"(codes[2]), "r"(codes[3]), "r"(x.x), "r"(x.y), "r"(FIRST_SUM));
}

// Add products of eight lines: left[2i + r] is row 2g + r and line 2t + i; right.x and right.y are these lines.
__device__ inline void multiply_floats(float sums[4], const float left[4], float2 right) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(__float_as_uint(left[0])), "r"(__float_as_uint(left[1])), "r"(__float_as_uint(left[2])),
        "r"(__float_as_uint(left[3])), "r"(__float_as_uint(right.x)), "r"(__float_as_uint(right.y)));
}

// What tf32 keeps of a number.
__device__ inline float upper_bits(float number) { return __uint_as_float(__float_as_uint(number) & 0xFFFFE000); }

// values[quad][r]: row 2g + r, pair 4 * quad + t.
using Values = float[QUADS][2];

// Add to `values` a superblock's codes times scales, for LIVE quads of both panels.
template <int slabs, int LIVE>
__device__ inline void add_codes(Values values[2], const uint8_t* const blocks[2], const uint8_t* x_codes,
                                 const float* x_scales, int g, int t) {
#pragma unroll
  for (int slab = 0; slab < slabs; slab++) {
    uint32_t codes[2][4];
    float scale[2][PARTS][2];
#pragma unroll
    for (int side = 0; side < 2; side++) {
      decode(blocks[side], slab, slabs, g, t, codes[side]);
      for (int part = 0; part < PARTS; part++) scales_of(blocks[side], slab, part, slabs, g, scale[side][part]);
    }
#pragma unroll
    for (int tile = 0; tile < (HALVES ? LIVE : (LIVE + 1) / 2); tile++) {
      const uint2 x = *reinterpret_cast<const uint2*>(x_codes + (slab * TILES + tile) * 256 + g * 32 + 8 * t);
      float x_scale[2];
      if constexpr (HALVES) {
        x_scale[0] = x_scale[1] = x_scales[slab * PAIRS + tile * 4 + t];
      } else if (2 * tile + 1 < LIVE) {
        *reinterpret_cast<float2*>(x_scale) =
            *reinterpret_cast<const float2*>(x_scales + slab * PAIRS + tile * 8 + 2 * t);
      } else {
        x_scale[0] = x_scales[slab * PAIRS + tile * 8 + 2 * t];
      }
#pragma unroll
      for (int side = 0; side < 2; side++) {
        int sums[4];
        multiply_codes(sums, codes[side], x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int r = i / 2, place = i % 2, quad = HALVES ? tile : 2 * tile + place;
          if (quad >= LIVE) continue;
          // Exact, since stage_rows leaves 22 bits to scales of x.
          const float none = -FIRST_SUM_AS_FLOAT * x_scale[place];
          const float sum = __fmaf_rn(__int_as_float(sums[i]), x_scale[place], none);
          values[side][quad][r] = __fmaf_rn(scale[side][HALVES ? place : 0][r], sum, values[side][quad][r]);
        }
      }
    }
  }
}

// Subtract a superblock's minimums times sums of x.
template <int slabs, int LIVE>
__device__ inline void subtract_minimums(Values values[2], const uint8_t* const blocks[2], const float* x_sums, int g,
                                         int t) {
  const float2 factors[2] = {minimum_factors(blocks[0], slabs, g), minimum_factors(blocks[1], slabs, g)};
#pragma unroll
  for (int first = 0; first < LINES; first += 8) {
    const int line = first + 2 * t;
    float minimum[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (slabs == 8 || line + i % 2 < slabs * PARTS)
        *reinterpret_cast<float2*>(minimum[i / 2] + i % 2 * 2) = minimums_of(blocks[i / 2], line + i % 2, slabs, g);
#pragma unroll
    for (int tile = 0; tile < (HALVES ? LIVE : (LIVE + 1) / 2); tile++) {
      const int place = HALVES ? tile * 4 + g / 2 : tile * 8 + g;  // by HALVES, two places have the same pair
      float2 x = *reinterpret_cast<const float2*>(x_sums + place * LINES + line);
      if (slabs < 8 && line >= slabs * PARTS) x.x = 0.0f;
      if (slabs < 8 && line + 1 >= slabs * PARTS) x.y = 0.0f;
      const float2 upper = make_float2(upper_bits(x.x), upper_bits(x.y));
      const float2 lower = make_float2(x.x - upper.x, x.y - upper.y);
#pragma unroll
      for (int side = 0; side < 2; side++) {
        float sums[4] = {};
        multiply_floats(sums, minimum[side], lower);
        multiply_floats(sums, minimum[side], upper);
        if constexpr (quant == UINT4) {
          float rest[4];
          for (int i = 0; i < 4; i++) rest[i] = minimum[side][i] - upper_bits(minimum[side][i]);
          multiply_floats(sums, rest, upper);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int r = i / 2, quad = HALVES ? tile : 2 * tile + i % 2;
          if (quad >= LIVE || (HALVES && i % 2 == 1)) continue;
          values[side][quad][r] =
              __fmaf_rn(r == 0 ? -factors[side].x : -factors[side].y, sums[i], values[side][quad][r]);
        }
      }
    }
  }
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

__device__ inline float join(float gate, float up) {
  if constexpr (activation == swiglu_clamped) {  // comparisons, so that NaN stays NaN
    gate = gate > LIMIT ? LIMIT : gate;
    up = up > LIMIT ? LIMIT : up;
    up = up < -LIMIT ? -LIMIT : up;
    return gate * sigmoid(ALPHA * gate) * (up + 1.0f);
  } else if constexpr (activation == gelu) {
    return 0.5f * gate * (1.0f + erff(gate * 0.7071067811865476f)) * up;
  } else if constexpr (activation == gelu_tanh) {
    return gate * sigmoid(2.0f * (0.7978845608028654f * (gate + 0.044715f * gate * gate * gate))) * up;
  } else {
    return gate * sigmoid(gate) * up;
  }
}

// Begin to copy 16 bytes to shared memory.
__device__ inline void copy(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Begin to copy BYTES, a multiple of 16. `to` and `from` are where the lane's first 16 bytes are.
template <int BYTES>
__device__ inline void copy_block(uint32_t to, const uint8_t* from, int lane) {
#pragma unroll
  for (int i = 0; i < BYTES; i += 512)
    if (i + 512 <= BYTES || i + 16 * lane < BYTES) copy(to + i, from + i);
}

// Wait until the kernel before this one has ended, where it is launched early; then let the next one begin.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait for the warp that has the other rows of a slab.
__device__ inline void sync_slab(int warp) { asm volatile("bar.sync %0, 64;" ::"r"(1 + warp / 2) : "memory"); }

// Bring the codes of `live` rows of x to shared memory, and what scales them.
__device__ inline void stage_rows(uint8_t* x_codes, float* x_scales, float* x_sums, const int* x_rows, int live,
                                  const uint8_t* codes, const float* scales, const int* sums) {
  const int threads = 32 * WARPS, sixteens = (live + 3) / 4 * SLABS * 8;
  constexpr int AT_ONCE = 4;  // loads before their use
  for (int first = threadIdx.x; first < sixteens; first += AT_ONCE * threads) {
    uint4 half[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int i = min(first + k * threads, sixteens - 1), pair = min(i / (8 * SLABS) * 4 + i / 2 % 4, live - 1);
      half[k] =
          *reinterpret_cast<const uint4*>(codes + int64(x_rows[pair]) * COLUMNS + 32 * (i / 8 % SLABS) + i % 2 * 16);
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int i = first + k * threads;
      if (i >= sixteens) break;
      const int part = i % 2, slab = i / 8 % SLABS, pair = i / (8 * SLABS) * 4 + i / 2 % 4;
      uint4* to = reinterpret_cast<uint4*>(x_codes + (slab * TILES * 8 + place_of(pair)) * 32 + 16 * part);
      to[HALVES ? 2 * part : 0] = half[k];
      if constexpr (HALVES) to[2 - 2 * part] = make_uint4(0, 0, 0, 0);
    }
  }
  for (int first = threadIdx.x; first < live * SLABS; first += AT_ONCE * threads) {
    float scale[AT_ONCE];
    int both[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int i = min(first + k * threads, live * SLABS - 1);
      const int64 at = int64(x_rows[i / SLABS]) * SLABS + i % SLABS;
      scale[k] = scales[at];
      if constexpr (MINIMUMS) both[k] = sums[at];
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int i = first + k * threads;
      if (i >= live * SLABS) break;
      const int pair = i / SLABS, slab = i % SLABS, place = HALVES ? pair : place_of(pair);
      scale[k] = __uint_as_float(__float_as_uint(scale[k]) & 0xFFFFFFFC);  // 22 bits: see add_codes
      x_scales[slab * PAIRS + place] = scale[k] * (1.0f / UNIT);
      if constexpr (MINIMUMS) {
        const int one = int(short(both[k])), other = (both[k] - one) >> 16;
        float* to = x_sums + (slab / 8 * PAIRS + place) * LINES + slab % 8 * PARTS;
        to[0] = scale[k] * float(HALVES ? one : one + other);
        if constexpr (HALVES) to[1] = scale[k] * float(other);
      }
    }
  }
}

// Multiply what the ring brings by LIVE quads. `take()` waits for two superblocks, and `release()` begins to copy others
// in their place.
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
  __shared__ int64 records[EXPERTS];
  __shared__ int starts_of[EXPERTS], counts_of[EXPERTS], ends[EXPERTS];
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
  for (int expert = threadIdx.x; expert < EXPERTS; expert += 32 * WARPS) {
    counts_of[expert] = __ldcg(counts + expert), starts_of[expert] = __ldcg(starts + expert);
    records[expert] = offsets[expert];
  }
  __syncthreads();
  // Up to PAIRS pairs of an expert are a list. ends: of the lists of an expert, counted over all experts.
  if (warp == 0) {
    int before = 0;
    for (int first = 0; first < EXPERTS; first += 32) {
      const int expert = first + lane;
      int end = expert < EXPERTS ? (counts_of[expert] + PAIRS - 1) / PAIRS : 0;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFF, end, distance);
        if (lane >= distance) end += other;
      }
      end += before;
      if (expert < EXPERTS) ends[expert] = end;
      before = __shfl_sync(0xFFFFFFFF, end, 31);
    }
  }
  __syncthreads();
  const auto expert_of = [&](int list) {
    int first = 0, last = EXPERTS - 1;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (ends[middle] > list)
        last = middle;
      else
        first = middle + 1;
    }
    return first;
  };

  // A job is a group of a list. Each program has a run of jobs, and its warps copy those that follow without a pause.
  const int jobs = ends[EXPERTS - 1] * GROUPS;
  const int first_job = int64(blockIdx.x) * jobs / gridDim.x, last_job = int64(blockIdx.x + 1) * jobs / gridDim.x;
  const auto couple_of = [&](int job) { return job % GROUPS * WARPS + warp; };
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

  if constexpr (activation == NONE) {
    wait_for_previous();
    for (int pair = blockIdx.x; pair < pairs; pair += gridDim.x) {  // rows of pairs that nobody computes are zero
      const int64 wanted = ids[pair];
      if (wanted < 0 || records[wanted] < 0)
        for (int row = threadIdx.x; row < ROWS; row += 32 * WARPS)
          static_cast<float*>(out)[int64(pair) * ROWS + row] = 0.0f;
    }
  }

  int list = -1, expert = 0, live = 0;
  for (int job = first_job; job < last_job; job++) {
    if (job / GROUPS != list) {
      list = job / GROUPS, expert = expert_of(list);
      const int done = (list - (expert > 0 ? ends[expert - 1] : 0)) * PAIRS;
      live = min(PAIRS, counts_of[expert] - done);
      __syncthreads();  // all have multiplied by the rows before
      if (threadIdx.x < live) {
        const int pair = __ldcg(sorted_pairs + starts_of[expert] + done + threadIdx.x);
        pair_of[threadIdx.x] = pair, x_rows[threadIdx.x] = pair / slots;
        weight_of[threadIdx.x] = WEIGHTED ? pair_weights[pair] : 1.0f;
      }
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
          if constexpr (BIASED) added = *reinterpret_cast<const float2*>(bias + int64(expert) * ROWS + row);
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
          const int64 at = int64(expert) * ROWS + row + r;
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
