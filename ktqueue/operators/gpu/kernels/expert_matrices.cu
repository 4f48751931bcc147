// Products of packed experts with int8 activations on tensor cores: see expert_matrices.py, which compiles this file.
//
// A warp multiplies panels of 16 rows by up to 8 * TILES pairs of one expert, one slab of 32 columns at a time:
// mma.m16n8k32 (PTX ISA, "Matrix Fragments for mma.m16n8k32"). Lane 4g + t of a warp has the rows g and g + 8 of the
// left operand, and of each four columns from 4t and from 16 + 4t. Columns are multiplied in any order, if both
// operands have the same, and rows may be stored where they belong. So a lane takes the rows 2g and 2g + 1 of a panel
// and the columns 8t .. 8t + 7 of a slab, which lie together in the packed planes (csrc/formats/panel_layout.h).
//
// Each warp copies the superblocks of its panels to a ring in shared memory, some ahead of their use. Sums begin at
// 1.5 * 2^23 as the bits of a float, which makes them floats without a conversion.

enum Quant {
  Q8_0, Q4_0, IQ4_NL, MXFP4, Q4_K, Q5_K, Q6_K, IQ4_XS, Q3_K, Q2_K, IQ3_XXS, IQ3_S, IQ2_S, IQ1_M, NVFP4, Q4_1, Q5_1,
  UINT4
};
enum Activation { NONE, silu, gelu, gelu_tanh, swiglu_clamped };

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64 = long long;

constexpr Quant quant = QUANT;
constexpr Activation activation = ACTIVATION;  // NONE: one matrix, otherwise gate and up
// By HALVES, each half of a slab has its own scale; by MINIMUMS, minimums are subtracted; by SIGNED, codes are signed
// bytes; OFFSET is to be subtracted from codes. All as dots.py says.
constexpr int SLABS = COLUMNS / 32;
constexpr int BLOCKS = (SLABS + 7) / 8;
constexpr int LAST_SLABS = SLABS - 8 * (BLOCKS - 1);
constexpr int MATRICES = activation == NONE ? 1 : 2;
constexpr int PAIRS = 8 * TILES;
constexpr int FACTORS = HALVES ? 4 : 2;  // words of a slab and a pair: see stage_rows
constexpr int PANEL_COUNT = (ROWS + 15) / 16;
constexpr int FIRST_SUM = 0x4B400000;
constexpr float FIRST_SUM_AS_FLOAT = 12582912.0f;

// Shared memory: rows of x, their factors, and the rings of all warps.
constexpr int CODE_BYTES = SLABS * PAIRS * 32;
constexpr int FACTOR_BYTES = SLABS * PAIRS * FACTORS * 4;

__device__ inline float half_at(const uint8_t *at) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(*reinterpret_cast<const uint16_t *>(at)));
  return value;
}

// A byte of `word` as a float plus 2^23, without a conversion: its bits are the sum.
__device__ inline float byte_plus(uint32_t word, int byte) {
  return __uint_as_float(__byte_perm(word, 0x4B000000, 0x7440 + byte));
}
__device__ inline float byte_as_float(uint32_t word, int byte) { return byte_plus(word, byte) - 8388608.0f; }
// A byte times `factor`, rounded once.
__device__ inline float byte_times(uint32_t word, int byte, float factor) {
  return __fmaf_rn(byte_plus(word, byte), factor, -8388608.0f * factor);
}
__device__ inline float signed_byte_as_float(uint32_t word, int byte) {
  return __uint_as_float(__byte_perm(word ^ 0x8080, 0x4B000000, 0x7440 + byte)) - 8388736.0f;
}

// The two bytes of rows 2g and 2g + 1.
__device__ inline uint32_t both_rows(const uint8_t *line, int g) {
  return *reinterpret_cast<const uint16_t *>(line + 2 * g);
}

__device__ inline uint32_t spread(uint32_t nibble) { return ((nibble & 15) * 0x00204081) & 0x01010101; }

__device__ inline void look_up(uint32_t word, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3, uint32_t &low,
                               uint32_t &high) {
  uint32_t index = word & 0x77777777, upper = 0x32103210 | ((word >> 1) & 0x44444444);
  uint32_t first = __byte_perm(__byte_perm(t0, t1, index), __byte_perm(t2, t3, index), upper);
  index >>= 16;
  uint32_t second = __byte_perm(__byte_perm(t0, t1, index), __byte_perm(t2, t3, index), upper >> 16);
  low = __byte_perm(first, second, 0x6420);
  high = __byte_perm(first, second, 0x7531);
}

__device__ inline uint32_t signed_magnitudes(uint32_t pairs, uint32_t negative) {
  uint32_t magnitudes = 0x08080808 + 17 * pairs + ((pairs >> 1) & 0x01010101);
  return (magnitudes ^ (negative * 255)) + negative;
}

// The codes of a slab that lane 4g + t multiplies: of row 2g + r, columns 8t .. 8t + 3 in codes[r], and the next four
// in codes[2 + r].
__device__ inline void decode(const uint8_t *block, int slab, int slabs, int g, int t, uint32_t codes[4]) {
  if constexpr (quant == Q8_0) {
    const uint8_t *at = block + slab * 512 + t * 128 + 8 * g;
    const uint2 even = *reinterpret_cast<const uint2 *>(at), odd = *reinterpret_cast<const uint2 *>(at + 64);
    codes[0] = even.x, codes[1] = even.y, codes[2] = odd.x, codes[3] = odd.y;
    return;
  }
  constexpr bool are_pairs = quant == Q2_K || quant == Q3_K || quant == IQ2_S || quant == IQ1_M;
  const uint8_t *at = block + (are_pairs ? slab * 128 + t / 2 * 64 : slab * 256 + t * 64) + 8 * g;
  const uint2 words = *reinterpret_cast<const uint2 *>(at);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    uint32_t word = r == 0 ? words.x : words.y, low, high;
    if constexpr (are_pairs) {
      word >>= t % 2 * 4;
      low = word & 0x03030303, high = (word >> 2) & 0x03030303;
      if constexpr (quant == Q3_K || quant == IQ2_S) {
        const uint8_t *bits = block + 128 * slabs + slab * 64 + t * 16 + g;
        uint32_t even = spread(bits[0] >> 4 * r), odd = spread(bits[8] >> 4 * r);
        if constexpr (quant == Q3_K) {
          low |= even << 2, high |= odd << 2;
        } else {
          low = signed_magnitudes(low, even), high = signed_magnitudes(high, odd);
        }
      } else if constexpr (quant == IQ1_M) {
        uint32_t bits = block[128 * slabs + slab * 8 + t * 2 + g / 4];
        uint32_t delta = ((bits >> (2 * g % 8 + r)) & 1) * 0x02020202;
        low = (low << 3) + delta, high = (high << 3) + delta;
      }
    } else if constexpr (quant == IQ4_NL || quant == IQ4_XS) {
      look_up(word, 0xBFAD9881, 0xF6EADDCF, 0x26190D01, 0x71594535, low, high);
    } else if constexpr (quant == IQ3_XXS) {
      look_up(word, 0xEEEAE6E1, 0xFEFAF6F2, 0x0E0A0602, 0x1F1A1612, low, high);
    } else if constexpr (quant == MXFP4 || quant == NVFP4) {
      look_up(word, 0x03020100, 0x0C080604, 0xFDFEFF00, 0xF4F8FAFC, low, high);
    } else {
      low = word & 0x0F0F0F0F, high = (word >> 4) & 0x0F0F0F0F;
      if constexpr (quant == IQ3_S) {
        low <<= 1, high <<= 1;
      } else if constexpr (quant == Q5_K || quant == Q5_1) {
        const uint8_t *bits = block + 256 * slabs + slab * 64 + t * 16 + g;
        low |= spread(bits[0] >> 4 * r) << 4, high |= spread(bits[8] >> 4 * r) << 4;
      } else if constexpr (quant == Q6_K) {
        uint32_t pairs = *reinterpret_cast<const uint32_t *>(block + 256 * slabs + slab * 128 + t / 2 * 64 + 8 * g + 4 * r);
        pairs >>= t % 2 * 4;
        low |= (pairs << 4) & 0x30303030, high |= (pairs << 2) & 0x30303030;
      }
    }
    codes[r] = low, codes[2 + r] = high;
  }
}

struct Scales {
  float scale[2][2], minimum[2][2];  // of a half and a row
};

// The scales of rows 2g and 2g + 1 in a slab, by the operations of formats.scales.
__device__ inline Scales scales_of(const uint8_t *block, int slab, int slabs, int g) {
  Scales result;
#pragma unroll
  for (int half = 0; half < (HALVES ? 2 : 1); half++) {
    uint32_t scale = 0, minimum = 0;
    const uint8_t *start = nullptr, *shared = nullptr;
    if constexpr (quant == Q4_K || quant == Q5_K) {
      start = block + (quant == Q5_K ? 320 : 256) * slabs;
      scale = both_rows(start + slab * 16, g), minimum = both_rows(start + (slabs + slab) * 16, g);
      shared = start + 32 * slabs;
    } else if constexpr (quant == Q2_K || quant == Q6_K || quant == Q3_K || quant == NVFP4) {
      start = block + (quant == Q2_K ? 128 : quant == Q6_K ? 384 : quant == Q3_K ? 192 : 256) * slabs;
      scale = both_rows(start + slab * 32 + half * 16, g);
      shared = start + 32 * slabs;
    } else if constexpr (quant == IQ4_XS || quant == IQ3_XXS || quant == IQ3_S || quant == IQ2_S || quant == IQ1_M) {
      start = block + (quant == IQ2_S ? 192 : quant == IQ1_M ? 136 : 256) * slabs;
      scale = both_rows(start + slab * 16, g);
      shared = start + 16 * slabs;
    } else if constexpr (quant == MXFP4) {
      scale = both_rows(block + 256 * slabs + slab * 16, g);
    } else {
      start = block + (quant == Q8_0 ? 512 : quant == Q5_1 ? 320 : 256) * slabs;
      if constexpr (quant == UINT4) minimum = both_rows(start + 32 * slabs + slab * 16, g);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float value, least = 0.0f;
      const int row = 2 * g + r;
      if constexpr (quant == Q4_K || quant == Q5_K) {
        value = byte_times(scale, r, half_at(shared + 2 * row));
        least = byte_times(minimum, r, half_at(shared + 32 + 2 * row));
      } else if constexpr (quant == Q2_K) {
        value = byte_as_float(scale & 0x0F0F, r) * half_at(shared + 2 * row);
        least = byte_as_float((scale >> 4) & 0x0F0F, r) * half_at(shared + 32 + 2 * row);
      } else if constexpr (quant == Q6_K || quant == Q3_K || quant == IQ4_XS) {
        value = signed_byte_as_float(scale, r) * half_at(shared + 2 * row);
      } else if constexpr (quant == IQ3_XXS || quant == IQ3_S) {
        value = byte_as_float(scale, r) * (half_at(shared + 2 * row) * (quant == IQ3_S ? 1.0f : 0.5f));
      } else if constexpr (quant == IQ2_S || quant == IQ1_M) {
        value = (byte_as_float((scale >> 4 * half) & 0x0F0F, r) + 0.5f) * (half_at(shared + 2 * row) * 0.25f);
      } else if constexpr (quant == Q4_1 || quant == Q5_1) {
        value = half_at(start + slab * 32 + 2 * row);
        least = -half_at(start + (slabs + slab) * 32 + 2 * row);
      } else if constexpr (quant == UINT4) {
        value = half_at(start + slab * 32 + 2 * row);
        least = value * byte_as_float(minimum, r);
      } else if constexpr (quant == NVFP4) {
        // e4m3 to float: its bits are those of a float16 of another exponent.
        const uint32_t code = (scale >> 8 * r) & 255;
        const uint16_t bits = (code & 128) << 8 | (code & 127) << 7;
        float number;
        asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
        number *= 128.0f;  // 256, halved as values are doubled
        const float *factors = reinterpret_cast<const float *>(shared) + row;
        value = __fmaf_rn(number, factors[0], number * factors[16]);
      } else if constexpr (quant == MXFP4) {
        const uint32_t exponent = (scale >> 8 * r) & 255;
        value = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
      } else {
        value = half_at(start + slab * 32 + 2 * row);
      }
      result.scale[half][r] = value, result.minimum[half][r] = least;
    }
  }
  return result;
}

__device__ inline void multiply_codes(int sums[4], const uint32_t codes[4], uint2 x) {
  if constexpr (SIGNED) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(codes[0]), "r"(codes[1]), "r"(codes[2]), "r"(codes[3]), "r"(x.x), "r"(x.y));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(codes[0]), "r"(codes[1]), "r"(codes[2]), "r"(codes[3]), "r"(x.x), "r"(x.y));
  }
}

// Add a superblock's products with the rows of x to `values`. values[tile][2r + c]: row 2g + r, pair 8 * tile + 2t + c.
template <int slabs>
__device__ inline void add_block(float values[TILES][4], const uint8_t *block, const uint8_t *x_codes,
                                 const uint32_t *x_factors, int live, int g, int t) {
#pragma unroll
  for (int slab = 0; slab < slabs; slab++) {
    uint32_t codes[4];
    decode(block, slab, slabs, g, t, codes);
    const Scales scales = scales_of(block, slab, slabs, g);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      if (TILES > 1 && tile > 0 && 8 * tile >= live) break;
      const uint2 x = *reinterpret_cast<const uint2 *>(x_codes + (slab * PAIRS + 8 * tile + g) * 32 + 8 * t);
      const uint32_t *of_pairs = x_factors + (slab * PAIRS + 8 * tile + 2 * t) * FACTORS;
      uint32_t factors[2][FACTORS];
      if constexpr (HALVES) {
        *reinterpret_cast<uint4 *>(factors[0]) = *reinterpret_cast<const uint4 *>(of_pairs);
        *reinterpret_cast<uint4 *>(factors[1]) = *reinterpret_cast<const uint4 *>(of_pairs + 4);
      } else {
        *reinterpret_cast<uint4 *>(factors[0]) = *reinterpret_cast<const uint4 *>(of_pairs);
      }
      int sums[HALVES ? 2 : 1][4];
#pragma unroll
      for (int half = 0; half < (HALVES ? 2 : 1); half++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[half][i] = MINIMUMS ? FIRST_SUM : int(factors[i % 2][1 + half]);
        const bool is_here = !HALVES || (t < 2) == (half == 0);
        multiply_codes(sums[half], codes, make_uint2(is_here ? x.x : 0, is_here ? x.y : 0));
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = i / 2, c = i % 2;
        const float x_scale = __uint_as_float(factors[c][0]);
        float value = __int_as_float(sums[0][i]) - FIRST_SUM_AS_FLOAT;
        if constexpr (HALVES) {
          value *= scales.scale[0][r];
          value = __fmaf_rn(scales.scale[1][r], __int_as_float(sums[1][i]) - FIRST_SUM_AS_FLOAT, value);
          values[tile][i] = __fmaf_rn(value, x_scale, values[tile][i]);
        } else {
          values[tile][i] = __fmaf_rn(scales.scale[0][r], value * x_scale, values[tile][i]);
        }
        if constexpr (MINIMUMS) {
          values[tile][i] = __fmaf_rn(-scales.minimum[0][r], __uint_as_float(factors[c][1]), values[tile][i]);
          if constexpr (HALVES)
            values[tile][i] = __fmaf_rn(-scales.minimum[1][r], __uint_as_float(factors[c][2]), values[tile][i]);
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

// Begin to copy BYTES, a multiple of 16, to shared memory. `to` and `from` are where the lane's first 16 bytes are.
template <int BYTES>
__device__ inline void copy_block(uint32_t to, const uint8_t *from, int lane) {
#pragma unroll
  for (int i = 0; i < BYTES; i += 512)
    if (i + 512 <= BYTES || i + 16 * lane < BYTES)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
}

// Bring the codes of `live` rows of x to shared memory as [slab][pair][32], and what scales them. Factors of a slab and
// a pair: its scale; then for formats with minimums scale times sum of codes, for others the first sums of products.
__device__ inline void stage_rows(uint8_t *x_codes, uint32_t *x_factors, const int *x_rows, int live,
                                  const uint8_t *codes, const float *scales, const int *sums) {
  for (int i = threadIdx.x; i < 2 * PAIRS * SLABS; i += 32 * WARPS) {
    const int part = i % 2, pair = i / 2 % PAIRS, slab = i / (2 * PAIRS);
    if (pair < live)
      *reinterpret_cast<uint4 *>(x_codes + (slab * PAIRS + pair) * 32 + 16 * part) =
          *reinterpret_cast<const uint4 *>(codes + int64(x_rows[pair]) * COLUMNS + 32 * slab + 16 * part);
  }
  for (int i = threadIdx.x; i < PAIRS * SLABS; i += 32 * WARPS) {
    const int pair = i / SLABS, slab = i % SLABS;
    if (pair >= live) continue;
    const int64 at = int64(x_rows[pair]) * SLABS + slab;
    const float scale = scales[at];
    const int both = sums[at], first = int(short(both)), second = (both - first) >> 16;
    uint32_t *to = x_factors + (slab * PAIRS + pair) * FACTORS;
    to[0] = __float_as_uint(scale);
    const int parts[2] = {HALVES ? first : first + second, second};
    for (int half = 0; half < (HALVES ? 2 : 1); half++)
      to[1 + half] = MINIMUMS ? __float_as_uint(scale * float(parts[half])) : FIRST_SUM - OFFSET * parts[half];
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, PROGRAMS)
multiply_experts(const uint8_t *pool, const int64 *offsets, const int64 *ids, const uint8_t *codes, const float *scales,
                 const int *sums, const float *pair_weights, const float *bias, const float *up_bias, void *out,
                 float *out_scales, int *out_sums, const int *sorted_pairs, const int *starts, const int *counts,
                 int pairs, int slots, int start, int zero_pairs) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ int pair_of[PAIRS], x_rows[PAIRS];
  __shared__ float largest_of[WARPS][PAIRS], broken_of[WARPS][PAIRS];
  __shared__ int sum_of[WARPS][PAIRS];
  uint8_t *x_codes = memory;
  uint32_t *x_factors = reinterpret_cast<uint32_t *>(memory + CODE_BYTES);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint8_t *ring = memory + CODE_BYTES + FACTOR_BYTES + warp * STAGES * SUPERBLOCK_BYTES;
  const int expert = blockIdx.y, first_panel = blockIdx.x * WARPS * PANELS + warp;
  const int count = counts[expert];

  if constexpr (activation == NONE) {  // rows of pairs that nobody computes are zero
    const int first_row = blockIdx.x * WARPS * PANELS * 16, rows = min(WARPS * PANELS * 16, ROWS - first_row);
    for (int i = 0; i < zero_pairs; i++) {
      const int pair = expert * zero_pairs + i;
      if (pair >= pairs) break;
      const int64 wanted = ids[pair];
      if (wanted < 0 || offsets[wanted] < 0)
        for (int row = threadIdx.x; row < rows; row += 32 * WARPS)
          static_cast<float *>(out)[int64(pair) * ROWS + first_row + row] = 0.0f;
    }
  }
  if (count <= 0) return;
  const uint8_t *record = pool + offsets[expert] + start;
  // Panels of this warp: first_panel, first_panel + WARPS and so on. A block is a superblock of one matrix of a panel.
  int panels_here = first_panel < PANEL_COUNT ? (PANEL_COUNT - first_panel + WARPS - 1) / WARPS : 0;
  panels_here = min(panels_here, PANELS);
  constexpr int BLOCKS_OF_PANEL = MATRICES * BLOCKS;
  constexpr int LAST_BYTES = PANEL_BYTES - (BLOCKS - 1) * SUPERBLOCK_BYTES;
  const uint32_t ring_at_lane = static_cast<uint32_t>(__cvta_generic_to_shared(ring)) + 16 * lane;
  const uint8_t *const begin = record + int64(first_panel) * MATRICES * PANEL_BYTES + 16 * lane;
  const uint8_t *from = begin;
  int of_panel = 0, slot = 0, missing = 0;  // of the next block to copy; and the number of blocks from it on
  auto fetch = [&] {
    if (missing > 0) {
      const uint32_t to = ring_at_lane + slot * SUPERBLOCK_BYTES;
      if (LAST_BYTES == SUPERBLOCK_BYTES || of_panel % BLOCKS < BLOCKS - 1) {
        copy_block<SUPERBLOCK_BYTES>(to, from, lane);
        from += SUPERBLOCK_BYTES;
      } else {
        copy_block<LAST_BYTES>(to, from, lane);
        from += LAST_BYTES;
      }
      slot = slot == STAGES - 1 ? 0 : slot + 1;
      missing--;
      if (++of_panel == BLOCKS_OF_PANEL) of_panel = 0, from += (WARPS - 1) * MATRICES * PANEL_BYTES;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  for (int done = 0; done < count; done += PAIRS) {
    const int live = min(PAIRS, count - done);
    from = begin, of_panel = slot = 0, missing = panels_here * BLOCKS_OF_PANEL;
    for (int i = 0; i < STAGES - 1; i++) fetch();
    if (threadIdx.x < live) {
      const int pair = sorted_pairs[starts[expert] + done + threadIdx.x];
      pair_of[threadIdx.x] = pair, x_rows[threadIdx.x] = pair / slots;
    }
    __syncthreads();
    stage_rows(x_codes, x_factors, x_rows, live, codes, scales, sums);
    __syncthreads();
    int used = 0;  // the ring's slot of the next block to multiply
    for (int round = 0; round < PANELS; round++) {
      const int panel = first_panel + round * WARPS;
      const bool is_active = round < panels_here;
      float values[MATRICES][TILES][4] = {};
      if (is_active) {
#pragma unroll
        for (int matrix = 0; matrix < MATRICES; matrix++) {
#pragma unroll 1
          for (int i = 0; i < BLOCKS; i++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncwarp();
            fetch();
            const uint8_t *here = ring + used * SUPERBLOCK_BYTES;
            used = used == STAGES - 1 ? 0 : used + 1;
            const uint8_t *x = x_codes + i * 8 * PAIRS * 32;
            const uint32_t *factors = x_factors + i * 8 * PAIRS * FACTORS;
            if (LAST_SLABS == 8 || i < BLOCKS - 1)
              add_block<8>(values[matrix], here, x, factors, live, g, t);
            else
              add_block<LAST_SLABS>(values[matrix], here, x, factors, live, g, t);
          }
        }
      }
      const int row = 16 * panel + 2 * g;
      if constexpr (activation == NONE) {
        if (!is_active) continue;
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
          const int column = i / 2 * 8 + 2 * t + i % 2;
          if (column >= live) continue;
          const int64 pair = pair_of[column];
          float weight = WEIGHTED ? pair_weights[pair] : 1.0f;
          float *to = static_cast<float *>(out) + pair * ROWS + row;
          const float *added = bias + int64(expert) * ROWS + row;
#pragma unroll
          for (int r = 0; r < 2; r++)
            if (ROWS % 16 == 0 || row + r < ROWS)
              to[r] = (values[0][i / 2][2 * r + i % 2] + (BIASED ? added[r] : 0.0f)) * weight;
        }
      } else {  // two warps have the rows of a slab
        float joined[2 * TILES][2];
        if (is_active) {
#pragma unroll
          for (int i = 0; i < 2 * TILES; i++) {
            const int column = i / 2 * 8 + 2 * t + i % 2;
            const float weight = WEIGHTED ? pair_weights[pair_of[min(column, live - 1)]] : 1.0f;
            float largest = 0.0f, broken = 0.0f;
#pragma unroll
            for (int r = 0; r < 2; r++) {
              const int64 at = int64(expert) * ROWS + row + r;
              const float gate = values[0][i / 2][2 * r + i % 2] * weight + (BIASED ? bias[at] : 0.0f);
              const float up = values[1][i / 2][2 * r + i % 2] * weight + (BIASED ? up_bias[at] : 0.0f);
              joined[i][r] = join(gate, up);
              largest = fmaxf(largest, fabsf(joined[i][r])), broken += joined[i][r] * 0.0f;
            }
#pragma unroll
            for (int other = 4; other < 32; other *= 2) {
              largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, other));
              broken += __shfl_xor_sync(0xFFFFFFFF, broken, other);
            }
            if (g == 0) largest_of[warp][column] = largest, broken_of[warp][column] = broken;
          }
        }
        __syncthreads();
        if (is_active) {
#pragma unroll
          for (int i = 0; i < 2 * TILES; i++) {
            const int column = i / 2 * 8 + 2 * t + i % 2;
            const float largest = fmaxf(largest_of[warp][column], largest_of[warp ^ 1][column]);
            const float broken = broken_of[warp][column] + broken_of[warp ^ 1][column];
            const float inverse = largest > 0.0f ? __fdiv_rn(127.0f, largest) : 0.0f;
            int code[2], sum = 0;
#pragma unroll
            for (int r = 0; r < 2; r++) {
              code[r] = broken == 0.0f ? __float2int_rn(joined[i][r] * inverse) : 0;
              sum += code[r];
            }
#pragma unroll
            for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, other);
            if (g == 0) sum_of[warp][column] = sum;
            if (column < live) {
              const int64 pair = pair_of[column];
              *reinterpret_cast<uint16_t *>(static_cast<uint8_t *>(out) + pair * ROWS + row) =
                  (code[0] & 255) | (code[1] & 255) << 8;
              if (g == 0 && warp % 2 == 0)
                out_scales[pair * (ROWS / 32) + panel / 2] = __fdiv_rn(largest, 127.0f) + broken;
            }
          }
        }
        __syncthreads();
        if (is_active && warp % 2 == 0 && lane < live)
          for (int column = lane; column < live; column += 32)
            out_sums[int64(pair_of[column]) * (ROWS / 32) + panel / 2] =
                sum_of[warp][column] + 65536 * sum_of[warp + 1][column];
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
  }
}
