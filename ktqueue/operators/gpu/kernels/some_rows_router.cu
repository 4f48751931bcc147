// From the residual of some rows to their experts, in one launch: see some_rows_router.py, which compiles this file.
//
// A cluster of programs has 16 rows. Each program norms all of them and has the logits of some experts: rows are the
// left operand of `multiply`, experts the right one. Columns may be
// multiplied in any order, if both operands have the same. So lane 4g + t takes columns 8t .. 8t + 7 of a slab, 16
// bytes of the rows g and g + 8, and of expert g. Each program chooses the experts of some rows, and gets their logits
// from the others. The first program of the last cluster lists the pairs of each expert.
//
// Further clusters request experts that the last step has chosen, and end: see ExpertRequests.

#include "bfloat16.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS;
constexpr int TILE_ROWS = 16, MOST_ROWS = TILE_ROWS * TILES;
constexpr int WIDTH = EXPERTS / PROGRAMS, GROUPS = WIDTH / 8;  // experts of a program
constexpr int SLABS = HIDDEN / 32;
constexpr int CHUNKS = (SLABS + WARPS - 1) / WARPS;  // slabs of a warp
constexpr int PITCH = WIDTH + 8;  // of sums in shared memory, so that a warp's writes touch each bank once
constexpr int TURNS = (TILE_ROWS + PROGRAMS - 1) / PROGRAMS;  // rows for which a program chooses
constexpr int OWN = (EXPERTS + 31) / 32;                      // experts of a lane
constexpr bool HOLDS_FACTORS = !FLOAT_NORM && CHUNKS <= 5;    // weights of the norm, in registers
constexpr bool LISTS = SORTS || COUNTS_USES;                  // the first program gets all that is chosen
constexpr uint32_t ALL = 0xFFFFFFFF;
#define INFINITE __int_as_float(0x7F800000)
static_assert(HIDDEN % 32 == 0 && EXPERTS % (8 * PROGRAMS) == 0 && EXPERTS <= THREADS && CHOSEN <= 32);
static_assert(TURNS <= WARPS && MOST_ROWS <= 64 && PROGRAMS <= 8 && (SORTS || REQUESTED == 0));

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(ALL, x, 1);
  return x + __shfl_xor_sync(ALL, x, 2);
}
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL, x, distance);
  return x;
}

// The bits of a float as a number of the same order, above 0 unless they are a NaN's; and back.
__device__ inline uint32_t sortable(float x) {
  const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);  // -0 equals 0, but their bits differ
  return bits ^ (bits >> 31 ? ALL : 0x80000000);
}
__device__ inline float sorted_float(uint32_t key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000 : ALL)); }

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
// The place in shared memory of another program of the cluster where this one has `pointer`.
__device__ inline uint32_t in_program(const void* pointer, int program) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(pointer)), "r"(program));
  return there;
}
__device__ inline void store_there(uint32_t place, uint32_t bits) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(place), "r"(bits) : "memory");
}
__device__ inline void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Round a slab of a row, of which four lanes have eight columns each: see expert_int8.py.
__device__ inline void quantise(const uint4& row, uint8_t* codes, float* scale, int* sum, int t, bool inside) {
  const uint32_t words[4] = {row.x, row.y, row.z, row.w};
  float values[8], largest = 0.0f, broken = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    values[i] = i % 2 ? high_float(words[i / 2]) : low_float(words[i / 2]);
    largest = fmaxf(largest, fabsf(values[i])), broken += values[i] * 0.0f;
  }
  largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
  broken = quad_sum(broken);  // NaN or 0
  const float inverse = largest > 0.0f ? __fdiv_rn(127.0f, largest) : 0.0f;
  uint32_t packed[2] = {};
  int total = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    // 1.5 * 2^23: the sum's lowest bits are the nearest integer.
    int code = __float_as_int(__fmaf_rn(values[i], inverse, 12582912.0f)) - 0x4B400000;
    code = broken == 0.0f ? code : 0;
    packed[i / 4] |= (code & 0xFF) << 8 * (i % 4);
    total += t < 2 ? code : code << 16;
  }
  total += __shfl_xor_sync(ALL, total, 1);
  total += __shfl_xor_sync(ALL, total, 2);
  if (!inside) return;
  *reinterpret_cast<uint2*>(codes + 8 * t) = make_uint2(packed[0], packed[1]);
  if (t == 0) *scale = __fdiv_rn(largest, 127.0f) + broken, *sum = total;
}

// Norm eight columns by `scale`, rounded as norm.py does it: bfloat16 weights multiply a rounded number.
__device__ inline uint4 normed(const uint4& x, float scale, const uint4& factors, const float* float_factors) {
  uint32_t words[4] = {x.x, x.y, x.z, x.w};
  const uint32_t by[4] = {factors.x, factors.y, factors.z, factors.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float low = low_float(words[i]) * scale, high = high_float(words[i]) * scale;
    if constexpr (FLOAT_NORM) {
      words[i] = two_bfloat16(low * float_factors[2 * i], high * float_factors[2 * i + 1]);
    } else {
      const uint32_t rounded = two_bfloat16(low, high);
      words[i] = two_bfloat16(low_float(rounded) * low_float(by[i]), high_float(rounded) * high_float(by[i]));
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

struct Lists {  // see SortedPairs
  int *sorted_pairs, *starts, *counts;
};

// List the pairs of each expert, in order. chosen: the expert of each pair, or -1. By one program.
__device__ inline void list_pairs(const int* chosen, const Lists& lists, bool is_here, int* uses, int* recent, int warp,
                                  int lane) {
  __shared__ int starts_of[EXPERTS], totals[WARPS];
  __shared__ uint32_t users[2][EXPERTS];  // bit n: row n, or 32 + n, has chosen the expert
  const int expert = threadIdx.x;
  if (expert < EXPERTS) users[0][expert] = users[1][expert] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < MOST_ROWS * CHOSEN; i += THREADS)
    if (chosen[i] >= 0) atomicOr(&users[i / CHOSEN / 32][chosen[i]], 1u << i / CHOSEN % 32);
  __syncthreads();
  const int count = expert < EXPERTS ? __popc(users[0][expert]) + __popc(users[1][expert]) : 0;
  int end = count;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(ALL, end, distance);
    if (lane >= distance) end += other;
  }
  if (lane == 31) totals[warp] = end;
  __syncthreads();
#pragma unroll
  for (int other = 0; other < WARPS; other++) end += other < warp ? totals[other] : 0;
  if (expert < EXPERTS) {
    starts_of[expert] = end - count;
    if constexpr (SORTS) lists.starts[expert] = end - count, lists.counts[expert] = is_here ? count : 0;
    if constexpr (COUNTS_USES) uses[expert] += count;
    if constexpr (REQUESTED > 0) recent[expert] = count;
  }
  if constexpr (!SORTS) return;
  __syncthreads();
  for (int i = threadIdx.x; i < MOST_ROWS * CHOSEN; i += THREADS) {
    if (chosen[i] < 0) continue;
    const int row = i / CHOSEN, word = row / 32;
    int place = starts_of[chosen[i]] + __popc(users[word][chosen[i]] & ((1u << row % 32) - 1));
    if (word == 1) place += __popc(users[0][chosen[i]]);
    lists.sorted_pairs[place] = i;
  }
}

// Begin to bring experts that the last step has chosen to the L2 cache: REQUESTED bytes in all, of each of the LINES
// that a record begins with, LINE_BYTES long, the first ones. By one of `programs`.
__device__ inline void request_experts(const uint8_t* pool, const int64* offsets, const int* recent, int program,
                                       int programs, int warp, int lane) {
  int probable = 0;
#pragma unroll
  for (int first = 0; first < EXPERTS; first += 32)
    probable += __popc(__ballot_sync(ALL, first + lane < EXPERTS && __ldcg(recent + first + lane) > 0));
  const int bytes = min(LINE_BYTES, REQUESTED / max(1, probable * LINES)) / 128 * 128;
  if (bytes == 0) return;
  for (int i = program * WARPS + warp; i < EXPERTS * ((LINES + 31) / 32); i += programs * WARPS) {
    const int expert = i % EXPERTS, line = i / EXPERTS * 32 + lane;
    const int64 offset = offsets[expert];
    if (offset < 0 || line >= LINES || __ldcg(recent + expert) == 0) continue;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(pool + offset + int64(line) * LINE_BYTES),
                 "r"(bytes)
                 : "memory");
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(PROGRAMS, 1, 1)
    route_some_rows(const uint16_t* residual, const void* norm, const uint16_t* router, const uint16_t* bias,
                    const float* scales, uint16_t* rows_out, uint8_t* codes, float* code_scales, int* code_sums,
                    int64* ids, float* weights, const int64* offsets, int* sorted_pairs, int* starts, int* counts,
                    const int* live_tokens, int* uses, int* counter, const uint8_t* pool, int* recent, int rows) {
  // The router's rows of this program, as lanes read them, and sums [WARPS][TILE_ROWS][PITCH].
  extern __shared__ __align__(16) uint8_t memory[];
  float* all_sums = reinterpret_cast<float*>(memory + CHUNKS * GROUPS * THREADS * 16);
  __shared__ float squares_of[WARPS][TILE_ROWS];
  __shared__ float logits_of[TURNS][EXPERTS];
  __shared__ int chosen[MOST_ROWS * CHOSEN];
  __shared__ bool is_last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int program = blockIdx.x, first = program * WIDTH, first_row = blockIdx.y * TILE_ROWS;
  const auto slab_of = [&](int c) { return warp + c * WARPS; };
  const auto exists = [&](int c) { return SLABS % WARPS == 0 || c < CHUNKS - 1 || slab_of(c) < SLABS; };

  if (REQUESTED > 0 && blockIdx.y >= TILES) {
    const int cluster = blockIdx.y - TILES, clusters = gridDim.y - TILES;
    return request_experts(pool, offsets, recent, cluster * PROGRAMS + program, clusters * PROGRAMS, warp, lane);
  }
  arrive();                                                        // this program has begun
  uint4* matrix = reinterpret_cast<uint4*>(memory) + threadIdx.x;  // a thread reads what it has copied itself
  uint4 factors[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int column = slab_of(c) * 32 + 8 * t;
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
      asm volatile(
          "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(matrix + (c * GROUPS + j) * THREADS)),
          "l"(router + (exists(c) ? int64(first + 8 * j + g) * HIDDEN + column : 0)), "r"(exists(c) ? 16 : 0)
          : "memory");
    if (HOLDS_FACTORS)
      factors[c] = exists(c) ? __ldcg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(norm) + column))
                             : make_uint4(0, 0, 0, 0);
  }
  asm volatile("cp.async.commit_group;\n griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");

  uint4 x[CHUNKS][2];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first_row + 8 * half + g;
      const uint16_t* from = residual + int64(row) * HIDDEN + slab_of(c) * 32 + 8 * t;
      x[c][half] = row < rows && exists(c) ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
    }
  const int live = HAS_LIVE ? *live_tokens : rows;
  const bool is_here = SORTS && threadIdx.x < EXPERTS && offsets[threadIdx.x] >= 0;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      const uint32_t words[4] = {x[c][half].x, x[c][half].y, x[c][half].z, x[c][half].w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float low = low_float(words[i]), high = high_float(words[i]);
        squares += low * low + high * high;
      }
    }
    squares = quad_sum(squares);
    if (t == 0) squares_of[warp][8 * half + g] = squares;
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  float scale[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float total = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) total += squares_of[other][8 * half + g];
    scale[half] = rsqrtf(total / HIDDEN + EPSILON);
  }
  float sums[GROUPS][4] = {};
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    float float_factors[8] = {};
    const int column = exists(c) ? slab_of(c) * 32 + 8 * t : 0;
    if constexpr (FLOAT_NORM) {
      const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(norm) + column);
      *reinterpret_cast<float4*>(float_factors) = from[0], *reinterpret_cast<float4*>(float_factors + 4) = from[1];
    } else if constexpr (!HOLDS_FACTORS) {
      factors[c] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(norm) + column);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) x[c][half] = normed(x[c][half], scale[half], factors[c], float_factors);
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
      const uint4 of = matrix[(c * GROUPS + j) * THREADS];
      multiply(sums[j], x[c][0].x, x[c][1].x, x[c][0].y, x[c][1].y, of.x, of.y);
      multiply(sums[j], x[c][0].z, x[c][1].z, x[c][0].w, x[c][1].w, of.z, of.w);
    }
  }
  float* own = all_sums + (warp * TILE_ROWS + g) * PITCH + 2 * t;
#pragma unroll
  for (int j = 0; j < GROUPS; j++) {
    *reinterpret_cast<float2*>(own + 8 * j) = make_float2(sums[j][0], sums[j][1]);
    *reinterpret_cast<float2*>(own + 8 * PITCH + 8 * j) = make_float2(sums[j][2], sums[j][3]);
  }
  __syncthreads();
  wait_for_cluster();
  for (int i = threadIdx.x; i < TILE_ROWS * WIDTH; i += THREADS) {
    const int row = i / WIDTH, expert = first + i % WIDTH;
    float logit = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) logit += all_sums[(other * TILE_ROWS + row) * PITCH + i % WIDTH];
    if constexpr (BIASED) logit += bfloat16_as_float(bias[expert]);
    store_there(in_program(&logits_of[row / PROGRAMS][expert], row % PROGRAMS), __float_as_uint(logit));
  }
  __syncwarp();
  arrive();
  // Meanwhile: every program has the whole rows, and writes some of their slabs.
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int64 slab = slab_of(c);
    if ((warp + c) % PROGRAMS != program || !exists(c)) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first_row + 8 * half + g;
      const int64 place = row * int64(SLABS) + slab;
      if (row < rows) *reinterpret_cast<uint4*>(rows_out + place * 32 + 8 * t) = x[c][half];
      quantise(x[c][half], codes + place * 32, code_scales + place, code_sums + place, t, row < rows);
    }
  }
  wait_for_cluster();

  const int row_of_tile = program + warp * PROGRAMS, row = first_row + row_of_tile;
  if (warp < TURNS && row_of_tile < TILE_ROWS) {  // a warp has a row
    float logit[OWN], largest = -INFINITE;
    uint32_t keys[OWN];
    bool unsound = false;
#pragma unroll
    for (int e = 0; e < OWN; e++) {
      const int expert = lane + 32 * e;
      logit[e] = expert < EXPERTS && row < rows ? logits_of[warp][expert] : -INFINITE;
      largest = fmaxf(largest, logit[e]);
      unsound |= !(logit[e] < INFINITE);
      keys[e] = expert < EXPERTS ? sortable(logit[e]) : 0;
    }
    largest = sorted_float(__reduce_max_sync(ALL, sortable(largest)));
    unsound = __any_sync(ALL, unsound) || largest == -INFINITE;
    int id = 0;
    float value = 0.0f;  // slot i is lane i's
#pragma unroll
    for (int slot = 0; slot < CHOSEN; slot++) {
      uint32_t best = keys[0];
#pragma unroll
      for (int e = 1; e < OWN; e++) best = max(best, keys[e]);
      best = __reduce_max_sync(ALL, best);
      uint32_t lowest = EXPERTS;  // of equal ones
#pragma unroll
      for (int e = OWN - 1; e >= 0; e--) lowest = keys[e] == best ? lane + 32 * e : lowest;
      lowest = __reduce_min_sync(ALL, lowest);
#pragma unroll
      for (int e = 0; e < OWN; e++) keys[e] = lane + 32 * e == lowest ? 0 : keys[e];
      if (lane == slot) id = lowest, value = sorted_float(best);
    }
    float weight;
    if constexpr (SIGMOID) {
      weight = lane < CHOSEN ? 1.0f / (1.0f + __expf(-value)) : 0.0f;
      if constexpr (RENORMALISE) weight /= warp_sum(weight) + SUM_FLOOR;
    } else {
      float total = weight = lane < CHOSEN ? __expf(value - largest) : 0.0f;
      if constexpr (!RENORMALISE) {
        total = 0.0f;
#pragma unroll
        for (int e = 0; e < OWN; e++) total += __expf(logit[e] - largest);
      }
      weight /= warp_sum(total);
    }
    weight *= SCALE;
    if (unsound) id = lane, weight = __int_as_float(0x7FC00000);
    if constexpr (HAS_SCALES) weight *= lane < CHOSEN ? scales[id] : 0.0f;
    if (row >= live) id = -1, weight = 0.0f;
    if (lane < CHOSEN) {
      if (row < rows) ids[row * CHOSEN + lane] = id, weights[row * CHOSEN + lane] = weight;
      if constexpr (LISTS) store_there(in_program(&chosen[row_of_tile * CHOSEN + lane], 0), row < rows ? id : -1);
    }
  }
  if constexpr (LISTS) {  // otherwise the first program may have ended
    __syncwarp();
    arrive();
    if (program > 0) return;
    wait_for_cluster();
    if constexpr (TILES > 1) {  // the last cluster continues: see `is_last` in operation.py
      if (threadIdx.x == 0) {
        int before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        is_last = before == TILES - 1;
        if (is_last) *counter = 0;
      }
      __syncthreads();
      if (!is_last) return;
      for (int i = threadIdx.x; i < MOST_ROWS * CHOSEN; i += THREADS)
        chosen[i] = i < rows * CHOSEN ? int(__ldcg(ids + i)) : -1;
    }
    list_pairs(chosen, {sorted_pairs, starts, counts}, is_here, uses, recent, warp, lane);
  }
}
