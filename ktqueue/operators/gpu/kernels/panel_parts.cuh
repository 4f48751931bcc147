// What kernels share that multiply some tokens by a packed matrix, or by two of different formats one below the other:
// see panel_tensor_cores.cu and panel_clusters.cu.
//
// A warp decodes slabs of a panel to bfloat16 in registers. These are the left operand of `multiply`. Columns are
// multiplied in any order, and rows may be stored where they belong. So lane 4g + t takes rows 2g and 2g + 1, and of a
// slab the columns 8t .. 8t + 7, which are 16 bytes of a row of x.
//
// NORMED: rows of x are those before an RMSNorm. They are multiplied by its weights, and sums by what the row's squares
// say.
#pragma once

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
constexpr int FIRST_PANELS = (FIRST_ROWS + 15) / 16, PANELS = FIRST_PANELS + (SECOND_ROWS + 15) / 16;
constexpr int TOKENS = 8 * TILES;
constexpr int TOKEN_STRIDE = 20;  // floats of 16 rows: so no two lanes write to the same bank
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
    static constexpr bool HAS_SMALL_CODES = name::HAS_SMALL_CODES;                                                    \
    static constexpr int PARTS = name::PARTS;                                                                         \
    static __device__ void codes(uint32_t left[2][4], const uint8_t* block, int slab, int g, int t, int slabs) {      \
      name::small_codes(left, block, slab, g, t, slabs);                                                              \
    }                                                                                                                 \
    static __device__ void scales(float scale[2], const uint8_t* block, const Factors& factors, int slab, int part,   \
                                  int g, int slabs) {                                                                 \
      name::scales_of(block, slab, part, slabs, g, factors.scales, scale);                                            \
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
  const uint16_t *x, *norm;  // of token g
  int64 stride;
  int live;  // tokens from g on
  int t;

  // Eight columns of a slab: 8t .. 8t + 7, or BY_HALVES four of each half from 4t on.
  template <bool BY_HALVES>
  __device__ uint4 columns(const uint16_t* slab) const {
    if constexpr (!BY_HALVES) return *reinterpret_cast<const uint4*>(slab + 8 * t);
    const uint2 first = *reinterpret_cast<const uint2*>(slab + 4 * t),
                second = *reinterpret_cast<const uint2*>(slab + 16 + 4 * t);
    return make_uint4(first.x, first.y, second.x, second.y);
  }

  // Of all tiles. Squares of the numbers are added to `squares`.
  template <bool BY_HALVES = false>
  __device__ void load(uint4 (&to)[TILES], float (&squares)[TILES], int block, int slab) const {
    const int column = block * 256 + slab * 32;
    uint4 factors;
    if constexpr (NORMED) factors = columns<BY_HALVES>(norm + column);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      to[tile] = make_uint4(0, 0, 0, 0);
      if (8 * tile < live) to[tile] = columns<BY_HALVES>(x + 8 * tile * stride + column);
      if constexpr (NORMED) multiply_each(to[tile], factors, squares[tile]);
    }
  }
};

// What an RMSNorm multiplies a token by. squares_of: sums of some columns each, [PARTS][TOKENS].
template <int PARTS>
__device__ inline float norm_scale(const float* squares_of, int token) {
  float total = 0.0f;
#pragma unroll
  for (int part = 0; part < PARTS; part++) total += squares_of[part * TOKENS + token];
  return rsqrtf(total / COLUMNS + EPSILON);
}

// Write a product: of a token, and row `in_part` of the first part or the second.
__device__ inline void write_product(float sum, void* out, const uint16_t* bias, int token, bool is_first, int in_part,
                                     int out_stride) {
  const int row = is_first ? in_part : FIRST_ROWS + in_part;
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
