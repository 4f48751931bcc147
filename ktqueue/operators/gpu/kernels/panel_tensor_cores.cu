// Products of some tokens with a packed matrix, or with two of different formats one below the other, on tensor cores:
// see panel_tensor_cores.py, which compiles this file.
//
// A program multiplies panels of 16 rows, one after the other. Each of its warps has some of a panel's superblocks: it
// copies them to shared memory, some ahead of their use, and decodes slabs to bfloat16 in registers. These are the left
// operand of `multiply`. Columns are multiplied in any order, and rows may be stored where they belong. So lane 4g + t
// takes rows 2g and 2g + 1, and of a slab the columns 8t .. 8t + 7, which are 16 bytes of a row of x. The sums of all
// warps are added in shared memory, always in the same order.
//
// NORMED: rows of x are those before an RMSNorm. They are multiplied by its weights, and sums by what the row's squares
// say, which each program adds on the way.

#include "bfloat16.cuh"

namespace first {
#include "superblock.cuh"
}
#if HAS_SECOND
#undef QUANT
#undef HALVES
#undef MINIMUMS
#undef OFFSET
#undef SUPERBLOCK_BYTES
#define QUANT SECOND_QUANT
#define HALVES SECOND_HALVES
#define MINIMUMS SECOND_MINIMUMS
#define OFFSET SECOND_OFFSET
#define SUPERBLOCK_BYTES SECOND_SUPERBLOCK_BYTES
namespace second {
#include "superblock.cuh"
}
#else
namespace second = first;
#endif

static_assert(COLUMNS % 32 == 0);
constexpr int THREADS = 32 * WARPS;
constexpr int BLOCKS = (COLUMNS + 255) / 256;
constexpr int LAST_SLABS = COLUMNS / 32 - 8 * (BLOCKS - 1);
constexpr int OWN = (BLOCKS + WARPS - 1) / WARPS;  // superblocks of a panel that a warp has
constexpr int FIRST_PANELS = (FIRST_ROWS + 15) / 16, PANELS = FIRST_PANELS + (SECOND_ROWS + 15) / 16;
constexpr int TOKENS = 8 * TILES;
constexpr bool HOLDS_X = OWN == 1 && TILES <= 2;  // in registers, for all panels
constexpr int TOKEN_STRIDE = 20;                  // floats of 16 rows: so no two lanes write to the same bank
constexpr int SUM_FLOATS = WARPS * TOKENS * TOKEN_STRIDE;
constexpr int SUM_BUFFERS = TILES <= 2 ? 2 : 1;
constexpr int SLOT_BYTES = first::SLOT_BYTES > second::SLOT_BYTES ? first::SLOT_BYTES : second::SLOT_BYTES;

#define PART(name, PREFIX)                                                                                            \
  struct name##_part {                                                                                                \
    static constexpr int BYTES = PREFIX##_SUPERBLOCK_BYTES, PANEL = PREFIX##_PANEL_BYTES,                             \
                         LAST = PANEL - (BLOCKS - 1) * BYTES;                                                         \
    static __device__ void fetch(uint32_t to, const uint8_t* panel, int block, int lane) {                            \
      const uint8_t* from = panel + block * BYTES + 16 * lane;                                                        \
      if (LAST == BYTES || block < BLOCKS - 1)                                                                        \
        name::copy_block<BYTES>(to, from, lane);                                                                      \
      else                                                                                                            \
        name::copy_block<LAST>(to, from, lane);                                                                       \
    }                                                                                                                 \
    using Factors = name::Factors;                                                                                    \
    static __device__ Factors factors(const uint8_t* block, int g, int slabs) {                                       \
      return name::factors_of(block, g, slabs);                                                                       \
    }                                                                                                                 \
    static __device__ void decode(uint32_t left[2][4], const uint8_t* block, const Factors& factors, int slab, int g, \
                                  int t, int slabs) {                                                                 \
      name::decode_slab(left, block, factors, slab, g, t, slabs);                                                     \
    }                                                                                                                 \
  }
PART(first, FIRST);
PART(second, SECOND);

// Multiply eight numbers by others. Their squares before that are added to `squares`.
__device__ inline void multiply_each(uint4& numbers, const uint4& by, float& squares) {
  uint32_t* const words[4] = {&numbers.x, &numbers.y, &numbers.z, &numbers.w};
  const uint32_t factors[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float low = low_float(*words[i]), high = high_float(*words[i]);
    squares = __fmaf_rn(low, low, __fmaf_rn(high, high, squares));
    *words[i] = two_bfloat16(low * low_float(factors[i]), high * high_float(factors[i]));
  }
}

struct Rows {
  const uint16_t *x, *norm;  // columns 8t .. 8t + 7, of token g
  int64 stride;
  int live;  // tokens from g on

  // Of all tiles. Squares of the numbers are added to `squares`.
  __device__ void load(uint4 (&to)[TILES], float (&squares)[TILES], int block, int slab) const {
    const int column = block * 256 + slab * 32;
    uint4 factors;
    if constexpr (NORMED) factors = *reinterpret_cast<const uint4*>(norm + column);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      to[tile] = make_uint4(0, 0, 0, 0);
      if (8 * tile < live) to[tile] = *reinterpret_cast<const uint4*>(x + 8 * tile * stride + column);
      if constexpr (NORMED) multiply_each(to[tile], factors, squares[tile]);
    }
  }
};

// Add a superblock's product. held: x of the warp's only superblock.
template <typename Part, int slabs>
__device__ inline void add_block(float (&sums)[TILES][4], float (&squares)[TILES], const uint8_t* here,
                                 const uint4 (&held)[8][TILES], const Rows& rows, int block, int g, int t) {
  const auto factors = Part::factors(here, g, slabs);
#pragma unroll
  for (int slab = 0; slab < slabs; slab++) {
    uint4 x[TILES];
    if constexpr (!HOLDS_X) rows.load(x, squares, block, slab);
    uint32_t left[2][4];
    Part::decode(left, here, factors, slab, g, t, slabs);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const uint4& right = HOLDS_X ? held[slab][tile] : x[tile];
      multiply(sums[tile], left[0][0], left[0][1], left[0][2], left[0][3], right.x, right.y);
      multiply(sums[tile], left[1][0], left[1][1], left[1][2], left[1][3], right.z, right.w);
    }
  }
}

template <typename Part>
__device__ inline void add(float (&sums)[TILES][4], float (&squares)[TILES], const uint8_t* here,
                           const uint4 (&held)[8][TILES], const Rows& rows, int block, int g, int t) {
  if (LAST_SLABS == 8 || block < BLOCKS - 1)
    add_block<Part, 8>(sums, squares, here, held, rows, block, g, t);
  else
    add_block<Part, LAST_SLABS>(sums, squares, here, held, rows, block, g, t);
}

extern "C" __global__ void __launch_bounds__(THREADS, PROGRAMS)
    multiply_panels(const uint8_t* first_panels, const uint8_t* second_panels, const uint16_t* x, const uint16_t* norm,
                    const uint16_t* bias, void* out, int tokens, int x_stride, int out_stride) {
  extern __shared__ __align__(128) uint8_t memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* all_sums = reinterpret_cast<float*>(memory);
  float* squares_of = all_sums + SUM_BUFFERS * SUM_FLOATS;  // [WARPS][TOKENS]
  uint8_t* ring = reinterpret_cast<uint8_t*>(squares_of + NORMED * WARPS * TOKENS) + warp * STAGES * SLOT_BYTES;
  const uint32_t ring_at_lane = static_cast<uint32_t>(__cvta_generic_to_shared(ring)) + first::place_of_byte(16 * lane);
  const int items = (PANELS - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x) * OWN;

  const auto fetch = [&](int item) {
    const int panel = blockIdx.x + item / OWN * gridDim.x, block = warp + item % OWN * WARPS;
    if (item < items && block < BLOCKS) {
      const uint32_t to = ring_at_lane + item % STAGES * SLOT_BYTES;
      if (SECOND_ROWS == 0 || panel < FIRST_PANELS)
        first_part::fetch(to, first_panels + int64(panel) * first_part::PANEL, block, lane);
      else
        second_part::fetch(to, second_panels + int64(panel - FIRST_PANELS) * second_part::PANEL, block, lane);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int item = 0; item < STAGES - 1; item++) fetch(item);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const Rows rows = {x + int64(g) * x_stride + 8 * t, norm + 8 * t, x_stride, tokens - g};
  uint4 held[8][TILES];
  float squares[TILES] = {};
  if constexpr (HOLDS_X) {
#pragma unroll
    for (int slab = 0; slab < 8; slab++)
      if (slab < LAST_SLABS || warp < BLOCKS - 1) rows.load(held[slab], squares, warp, slab);
  }
  float sums[TILES][4];
#pragma unroll 1
  for (int item = 0; item < items; item++) {
    const int panel = blockIdx.x + item / OWN * gridDim.x, turn = item % OWN, block = warp + turn * WARPS;
    const bool is_first = SECOND_ROWS == 0 || panel < FIRST_PANELS;
    if (turn == 0) {
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0.0f;
    }
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncwarp();
    const uint8_t* here = ring + item % STAGES * SLOT_BYTES;
    fetch(item + STAGES - 1);  // to the slot of the item before, which all lanes have read
    if (block < BLOCKS) {
      if (is_first)
        add<first_part>(sums, squares, here, held, rows, block, g, t);
      else
        add<second_part>(sums, squares, here, held, rows, block, g, t);
    }
    if (turn < OWN - 1) continue;
    float* of_panel = all_sums + (SUM_BUFFERS > 1 ? item / OWN % 2 * SUM_FLOATS : 0);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        *reinterpret_cast<float2*>(of_panel + (warp * TOKENS + 8 * tile + 2 * t + i) * TOKEN_STRIDE + 2 * g) =
            make_float2(sums[tile][i], sums[tile][2 + i]);
    if (NORMED && item < OWN) {  // with later panels, they would be counted again
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        squares[tile] += __shfl_xor_sync(0xFFFFFFFF, squares[tile], 1);
        squares[tile] += __shfl_xor_sync(0xFFFFFFFF, squares[tile], 2);
        if (t == 0) squares_of[warp * TOKENS + 8 * tile + g] = squares[tile];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * TOKENS; i += THREADS) {
      const int token = i / 16, in_panel = 16 * (is_first ? panel : panel - FIRST_PANELS) + i % 16;
      if (token >= tokens || in_panel >= (is_first ? FIRST_ROWS : SECOND_ROWS)) continue;
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < WARPS; other++) sum += of_panel[(other * TOKENS + token) * TOKEN_STRIDE + i % 16];
      if constexpr (NORMED) {
        float total = 0.0f;
#pragma unroll
        for (int other = 0; other < WARPS; other++) total += squares_of[other * TOKENS + token];
        sum *= rsqrtf(total / COLUMNS + EPSILON);
      }
      const int row = is_first ? in_panel : FIRST_ROWS + in_panel;
      if constexpr (BIASED) sum += bfloat16_as_float(bias[row]);
      const int64 at = int64(token) * out_stride + row;
      if constexpr (FLOAT_OUT) {
        static_cast<float*>(out)[at] = sum;
      } else {
        uint16_t* to = static_cast<uint16_t*>(out) + at;
        uint16_t result = as_bfloat16(sum);
        if constexpr (ADDS) result = as_bfloat16(bfloat16_as_float(*to) + bfloat16_as_float(result));
        *to = result;
      }
    }
    if constexpr (SUM_BUFFERS == 1) __syncthreads();
  }
}
