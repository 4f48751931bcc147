// Products of many tokens with packed experts on Hopper's tensor cores: see expert_warpgroups.py, which compiles this
// file.
//
// A warp decodes panels of 16 rows to bfloat16 on the way to the tensor cores: two at once, gate and up of the same
// rows, or neighbours of down. Four warps are a warpgroup, and multiply by rows of x in shared memory (PTX ISA,
// "wgmma.mma_async"). Their left operand is in registers: lane 4g + t of a warp has the rows g and g + 8 of its panel,
// and of each 16 columns 2t, 2t + 1, 2t + 8 and 2t + 9. Columns are multiplied in any order, if both operands have the
// same, and rows may be stored where they belong. So a lane takes rows 2g and 2g + 1 and of a slab columns 8t .. 8t + 7,
// which lie together in the packed planes, and column 8t + 4s + 2h + e of a slab of x lies at 16s + 8h + 2t + e.

#include "superblock.cuh"

enum Activation { NONE, silu, gelu, gelu_tanh, swiglu_clamped };

constexpr Activation activation = ACTIVATION;  // NONE: one matrix, otherwise gate and up
constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int COUPLE_ROWS = activation == NONE ? 32 : 16;  // of a warp
constexpr int GROUP_ROWS = WARPS * COUPLE_ROWS;            // of a program
static_assert(ROWS % GROUP_ROWS == 0 && COLUMNS % 256 == 0);
constexpr int GROUPS = ROWS / GROUP_ROWS;
constexpr int BLOCKS = COLUMNS / 256;
constexpr int CHUNK = 64;  // columns of x that are copied at once: two slabs, 128 bytes of a row
constexpr int CHUNKS = COLUMNS / CHUNK;
constexpr int CHUNK_BYTES = PAIRS * 2 * CHUNK;
constexpr int CHUNK_SLOTS = 5;  // in shared memory: three are on their way, and two may still be read
constexpr int SLOT_BYTES = (SUPERBLOCK_BYTES + 127) / 128 * 128;
constexpr int STAGE_BYTES = 2 * SLOT_BYTES;
constexpr int STAGES = 2;  // superblocks of each of a warp's panels in shared memory
constexpr bool IS_SIGNED = OFFSET != 0 || quant == Q8_0 || quant == Q6_K || quant == Q4_0 || !MINIMUMS;

// To a few units in the last place of float32, which the rounding to bfloat16 hides.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

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

// Begin to copy a superblock. `to` and `from` are where the lane's first 16 bytes are.
__device__ inline void copy_block(uint32_t to, const uint8_t* from, int lane) {
#pragma unroll
  for (int i = 0; i < SUPERBLOCK_BYTES; i += 512)
    if (i + 512 <= SUPERBLOCK_BYTES || i + 16 * lane < SUPERBLOCK_BYTES) copy(to + i, from + i);
}

__device__ inline uint32_t two_bfloat16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// A signed byte plus 32896, or a byte below 128 plus 128: bits of a float.
__device__ inline float code_plus(uint32_t word, int byte) {
  if constexpr (IS_SIGNED) return __uint_as_float(__byte_perm(word, 0x47000000, 0x7404 + 16 * byte));
  return __uint_as_float(__byte_perm(word, 0x43000000, 0x7044 + 256 * byte));
}
constexpr float CODE_OFFSET = IS_SIGNED ? 32896.0f : 128.0f;

// left[s][..]: the left operand of columns 4s .. 4s + 3 of each eight.
__device__ inline void decode_slab(uint32_t left[2][4], const uint8_t* block, int slab, int g, int t) {
  uint32_t codes[4];
  decode(block, slab, 8, g, t, codes);
  float scale[2];
  scales_of(block, slab, PARTS == 1 ? 0 : t / 2, 8, g, scale);
  float minimum[2] = {};
  if constexpr (MINIMUMS) {
    const float2 numbers = minimums_of(block, PARTS == 1 ? slab : 2 * slab + t / 2, 8, g);
    const float2 factors = minimum_factors(block, 8, g);
    minimum[0] = numbers.x * factors.x, minimum[1] = numbers.y * factors.y;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float factor = scale[r] * (1.0f / UNIT), offset = __fmaf_rn(-CODE_OFFSET, factor, -minimum[r]);
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const uint32_t word = IS_SIGNED ? codes[2 * s + r] ^ 0x80808080 : codes[2 * s + r];
      float value[4];
#pragma unroll
      for (int i = 0; i < 4; i++) value[i] = __fmaf_rn(code_plus(word, i), factor, offset);
      left[s][r] = two_bfloat16(value[0], value[1]);
      left[s][2 + r] = two_bfloat16(value[2], value[3]);
    }
  }
}

// The right operand: rows of 128 bytes, of which 16 bytes lie where their number, by exclusive or with the row's, says.
__device__ inline unsigned long long right_operand(uint32_t address) {
  return (address >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#define FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_48 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_64 NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define MULTIPLY(width, names, left_names, right_name, ...)                                                  \
  asm volatile("{.reg .pred adds; setp.eq.u32 adds, 0, 0;\n"                                                 \
               "wgmma.mma_async.sync.aligned.m64n" width "k16.f32.bf16.bf16 {" names "}, {" left_names "}, " \
               right_name ", adds, 1, 1, 0;}"                                                                \
               : __VA_ARGS__                                                                                 \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))

// Begin to add the product of 16 columns: sums[4i + 2r + e] is row 2g + r of a panel, pair 8i + 2t + e.
template <int N>
__device__ inline void multiply(float (&sums)[N / 2], const uint32_t left[4], unsigned long long right) {
  if constexpr (N == 32)
    MULTIPLY("32", NAMES_16, "%16,%17,%18,%19", "%20", SIXTEEN(0));
  else if constexpr (N == 64)
    MULTIPLY("64", NAMES_32, "%32,%33,%34,%35", "%36", SIXTEEN(0), SIXTEEN(16));
  else if constexpr (N == 96)
    MULTIPLY("96", NAMES_48, "%48,%49,%50,%51", "%52", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32));
  else
    MULTIPLY("128", NAMES_64, "%64,%65,%66,%67", "%68", SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48));
}

__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// What a program multiplies at once: a list of pairs of an expert by 16 or 32 rows for each of its warps.
struct Job {
  const uint8_t* panels;  // where the lane's first 16 bytes of its warp's first panel are
  const uint8_t* x;       // 16 bytes of the first chunk of row 0, at the thread's place in a row
  const uint32_t *pairs, *x_rows;  // [PAIRS], in shared memory
  int live, expert, couple;
};

struct Results {
  const float *pair_weights, *bias, *up_bias;
  uint16_t* out;
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
    for (int side = 0; side < 2; side++) copy_block(to + side * SLOT_BYTES, from + side * PANEL_BYTES, lane);
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
        joined[r] = join(gate, up);
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

  // Up to PAIRS pairs of an expert are a list. ends: of the lists of an expert, counted over all experts.
  if (warp == 0) {
    int before = 0;
    for (int first = 0; first < EXPERTS; first += 32) {
      const int expert = first + lane;
      int end = expert < EXPERTS ? (counts[expert] + PAIRS - 1) / PAIRS : 0;
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
  const int jobs = ends[EXPERTS - 1] * GROUPS;
  const Results results = {pair_weights, bias, up_bias, out};
  for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
    const int list = job / GROUPS, group = job % GROUPS;
    int expert = 0, last = EXPERTS - 1;
    while (expert < last) {
      const int middle = (expert + last) / 2;
      if (ends[middle] > list)
        last = middle;
      else
        expert = middle + 1;
    }
    // The lists of an expert have about as many pairs as each other.
    const int first_list = expert > 0 ? ends[expert - 1] : 0, lists = ends[expert] - first_list;
    const int size = ((counts[expert] + lists - 1) / lists + 7) / 8 * 8, done = (list - first_list) * size;
    const int live = min(size, counts[expert] - done);
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
