// Products of two panels of 16 rows, a superblock at a time, with rows of x in shared memory.
//
// A warp takes one slab of 32 columns at a time: mma.m16n8k32 (PTX ISA, "Matrix Fragments for mma.m16n8k32"). Lane
// 4g + t of a warp has the rows g and g + 8 of the left operand, and of each four columns from 4t and from 16 + 4t.
// Columns are multiplied in any order, if both operands have the same, and rows may be stored where they belong. So a
// lane takes rows and columns that lie together in the packed planes: see superblock.cuh.
//
// The right operand has eight *places*. Of a lane's two results in a row, one is in an even place and one in an odd
// place. Four pairs are a *quad*. By HALVES, the places are the two halves of a quad's slabs, each with zeros in place
// of the other half. Otherwise they are two quads, so that a lane leaves out the second one if nobody needs it.
//
// Sums begin at 1.5 * 2^23 as the bits of a float, which makes them floats without a conversion. Minimums are a product
// too: of all slabs of a superblock at once, with the sums of x over these slabs. It is that of tf32, which has 11
// significant bits. So sums are split into two numbers, and their product has 22.
#pragma once

#include "superblock.cuh"

static_assert(COLUMNS % 32 == 0);
constexpr int SLABS = COLUMNS / 32;
constexpr int BLOCKS = (SLABS + 7) / 8;
constexpr int LAST_SLABS = SLABS - 8 * (BLOCKS - 1);
constexpr int QUADS = PAIRS / 4;
constexpr int TILES = HALVES ? QUADS : QUADS / 2;  // of eight places
constexpr uint32_t FIRST_SUM = 0x4B400000;
constexpr float FIRST_SUM_AS_FLOAT = 12582912.0f;

// Rows of x: codes [SLABS][8 * TILES places][32], scales [SLABS][PAIRS], sums for minimums [BLOCKS][PAIRS][LINES].
constexpr int LINES = 8 * PARTS;
constexpr int CODE_BYTES = SLABS * TILES * 8 * 32;
constexpr int SCALE_BYTES = SLABS * PAIRS * 4;
constexpr int SUM_BYTES = MINIMUMS ? BLOCKS * PAIRS * LINES * 4 : 0;

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
