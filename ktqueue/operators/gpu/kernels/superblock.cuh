// What one lane takes from a superblock of packed weights: codes, scales and minimums. csrc/formats/panel_layout.h has
// the layout. Lane 4g + t has rows 2g and 2g + 1 of a panel, of a slab columns 8t .. 8t + 7.
//
// All codes become signed bytes, so that no offset is left to subtract from sums. Some are made larger by a power of
// two, UNIT, since that makes them signed for nothing.
//
// A source with two formats includes this twice, each time in another namespace, behind bfloat16.cuh.

#include "bfloat16.cuh"

enum Quant {
  Q8_0,
  Q4_0,
  IQ4_NL,
  MXFP4,
  Q4_K,
  Q5_K,
  Q6_K,
  IQ4_XS,
  Q3_K,
  Q2_K,
  IQ3_XXS,
  IQ3_S,
  IQ2_S,
  IQ1_M,
  NVFP4,
  Q4_1,
  Q5_1,
  UINT4
};

constexpr Quant quant = QUANT;
// By HALVES, each half of a slab has its own scale; by MINIMUMS, minimums are subtracted; OFFSET is to be subtracted
// from codes. All as dots.py says.
constexpr int PARTS = HALVES ? 2 : 1;  // of a slab, with a scale and a minimum each
constexpr float UNIT = quant == Q6_K ? 4.0f : quant == Q4_0 ? 16.0f : 1.0f;

constexpr int SLOT_BYTES = (SUPERBLOCK_BYTES + 127) / 128 * 128;  // of a superblock in shared memory

// In shared memory, 16 bytes of a superblock lie where their reads by half a warp touch each bank once.
__device__ inline int place_of_byte(int at) { return at ^ ((at >> 2) & 32); }

#ifndef READ_ONCE  // whether few superblocks are read twice
#define READ_ONCE 0
#endif

// What is read so leaves the L2 cache before all else.
__device__ inline unsigned long long first_to_leave() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Begin to copy 16 bytes to shared memory.
__device__ inline void copy(uint32_t to, const uint8_t* from) {
  if constexpr (READ_ONCE)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "l"(first_to_leave())
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// A warp begins to copy BYTES of a superblock, a multiple of 16. `to` and `from` are where the lane's first 16 bytes
// are.
template <int BYTES>
__device__ inline void copy_block(uint32_t to, const uint8_t* from, int lane) {
#pragma unroll
  for (int i = 0; i < BYTES; i += 512)
    if (i + 512 <= BYTES || i + 16 * lane < BYTES) copy(to + i, from + i);
}

template <typename T>
__device__ inline T at(const uint8_t* block, int byte) {
  return *reinterpret_cast<const T*>(block + place_of_byte(byte));
}

// At byte `whole` + `rest`. whole: a multiple of 256, which changes no place: the compiler keeps that of `rest`.
template <typename T>
__device__ inline T at(const uint8_t* block, int whole, int rest) {
  return *reinterpret_cast<const T*>(block + whole + place_of_byte(rest));
}

__device__ inline float half_as_float(uint16_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
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
// A signed byte times `factor`, a float16, rounded once. In a number from 2^15 on, bits 8 .. 15 are the whole part.
__device__ inline float signed_byte_times(uint32_t word, int byte, float factor) {
  return __fmaf_rn(__uint_as_float(__byte_perm(word ^ 0x8080, 0x47000000, 0x7404 + 16 * byte)), factor,
                   -32896.0f * factor);
}

__device__ inline uint32_t spread(uint32_t nibble) { return ((nibble & 15) * 0x00204081) & 0x01010101; }

__device__ inline void look_up(uint32_t word, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3, uint32_t& low,
                               uint32_t& high) {
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

// (word & mask) | other, and (word & mask) ^ other. Of constants, the compiler would make two instructions.
__device__ inline uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t other) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "r"(mask), "r"(other));
  return result;
}
__device__ inline uint32_t masked_xor(uint32_t word, uint32_t mask, uint32_t other) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(result) : "r"(word), "r"(mask), "r"(other));
  return result;
}

// Bytes minus OFFSET, as signed bytes.
__device__ inline uint32_t without_offset(uint32_t bytes) {
  return (bytes + 0x01010101u * (128 - OFFSET)) ^ 0x80808080;
}

// The codes of a slab: of row 2g + r, columns 8t .. 8t + 3 in codes[r], and the next four in codes[2 + r].
__device__ inline void decode(const uint8_t* block, int slab, int slabs, int g, int t, uint32_t codes[4]) {
  if constexpr (quant == Q8_0) {
    const int line = t * 128 + 8 * g;
    const uint2 even = at<uint2>(block, slab * 512, line), odd = at<uint2>(block, slab * 512, line + 64);
    const uint32_t sign = 0x80808080;
    codes[0] = even.x ^ sign, codes[1] = even.y ^ sign, codes[2] = odd.x ^ sign, codes[3] = odd.y ^ sign;
    return;
  }
  constexpr bool are_pairs = quant == Q2_K || quant == Q3_K || quant == IQ2_S || quant == IQ1_M;
  const uint2 words =
      are_pairs ? at<uint2>(block, slab * 128 + t / 2 * 64 + 8 * g) : at<uint2>(block, slab * 256, t * 64 + 8 * g);
  uint2 upper = {};  // Q6_K: the upper two bits of codes
  if constexpr (quant == Q6_K) upper = at<uint2>(block, 256 * slabs + slab * 128 + t / 2 * 64 + 8 * g);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    uint32_t word = r == 0 ? words.x : words.y, low, high;
    if constexpr (are_pairs) {
      word >>= t % 2 * 4;
      low = word & 0x03030303, high = (word >> 2) & 0x03030303;
      if constexpr (quant == Q3_K || quant == IQ2_S) {
        const int bits = 128 * slabs + slab * 64 + t * 16 + g;
        uint32_t even = spread(at<uint8_t>(block, bits) >> 4 * r), odd = spread(at<uint8_t>(block, bits + 8) >> 4 * r);
        if constexpr (quant == Q3_K) {
          low = without_offset(low | even << 2), high = without_offset(high | odd << 2);
        } else {
          low = signed_magnitudes(low, even), high = signed_magnitudes(high, odd);
        }
      } else if constexpr (quant == IQ1_M) {
        uint32_t bits = at<uint8_t>(block, 128 * slabs + slab * 8 + t * 2 + g / 4);
        uint32_t delta = ((bits >> (2 * g % 8 + r)) & 1) * 0x02020202;
        low = without_offset((low << 3) + delta), high = without_offset((high << 3) + delta);
      }
    } else if constexpr (quant == IQ4_NL || quant == IQ4_XS) {
      look_up(word, 0xBFAD9881, 0xF6EADDCF, 0x26190D01, 0x71594535, low, high);
    } else if constexpr (quant == IQ3_XXS) {
      look_up(word, 0xEEEAE6E1, 0xFEFAF6F2, 0x0E0A0602, 0x1F1A1612, low, high);
    } else if constexpr (quant == MXFP4 || quant == NVFP4) {
      look_up(word, 0x03020100, 0x0C080604, 0xFDFEFF00, 0xF4F8FAFC, low, high);
    } else if constexpr (quant == Q4_0) {  // 16 * (code - 8)
      low = masked_xor(word << 4, 0xF0F0F0F0, 0x80808080), high = masked_xor(word, 0xF0F0F0F0, 0x80808080);
    } else if constexpr (quant == Q6_K) {  // 4 * (code - 32)
      const uint32_t twos = r == 0 ? upper.x : upper.y;
      const int shift = 6 - t % 2 * 4;
      low = masked_or(word << 2, 0x3C3C3C3C, masked_xor(twos << shift, 0xC0C0C0C0, 0x80808080));
      high = masked_or(word >> 2, 0x3C3C3C3C, masked_xor(twos << (shift - 2), 0xC0C0C0C0, 0x80808080));
    } else {
      low = word & 0x0F0F0F0F, high = (word >> 4) & 0x0F0F0F0F;
      if constexpr (quant == IQ3_S) {
        low = without_offset(low << 1), high = without_offset(high << 1);
      } else if constexpr (quant == Q5_K || quant == Q5_1) {
        const int bits = 256 * slabs + slab * 64 + t * 16 + g;
        low |= spread(at<uint8_t>(block, bits) >> 4 * r) << 4, high |= spread(at<uint8_t>(block, bits + 8) >> 4 * r)
                                                                       << 4;
      }
    }
    codes[r] = low, codes[2 + r] = high;
  }
}

// The two bytes of rows 2g and 2g + 1, of a line that begins at `line`.
__device__ inline uint32_t both_rows(const uint8_t* block, int line, int g) {
  return at<uint16_t>(block, line + 2 * g);
}

// The two float16 of rows 2g and 2g + 1.
__device__ inline float2 both_halves(const uint8_t* block, int line, int g) {
  const uint32_t both = at<uint32_t>(block, line + 4 * g);
  return make_float2(half_as_float(both), half_as_float(both >> 16));
}

// Where the scales of a superblock begin.
__device__ inline int scales_at(int slabs) {
  constexpr int bytes = quant == Q8_0                     ? 512
                        : quant == Q6_K                   ? 384
                        : quant == Q5_K || quant == Q5_1  ? 320
                        : quant == Q3_K || quant == IQ2_S ? 192
                        : quant == IQ1_M                  ? 136
                        : quant == Q2_K                   ? 128
                                                          : 256;
  return bytes * slabs;
}

constexpr bool HAS_PARTS = quant == Q2_K || quant == Q6_K || quant == Q3_K || quant == NVFP4;
constexpr bool ARE_HALVES =  // scales; each slab has its own
    quant == Q8_0 || quant == Q4_0 || quant == IQ4_NL || quant == Q4_1 || quant == Q5_1 || quant == UINT4;

// Where a superblock has what it has once.
__device__ inline int shared_at(int slabs) {
  return scales_at(slabs) + (HAS_PARTS || quant == Q4_K || quant == Q5_K ? 32 : 16) * slabs;
}

// What multiplies the scales of rows 2g and 2g + 1 of a superblock, in formats that have it.
__device__ inline float2 scale_factors(const uint8_t* block, int slabs, int g) {
  if constexpr (ARE_HALVES || quant == MXFP4 || quant == NVFP4) return make_float2(1.0f, 1.0f);
  return both_halves(block, shared_at(slabs), g);
}

// The scales of rows 2g and 2g + 1 in part `part` of a slab, by the operations of formats.scales. factors: from
// `scale_factors`.
__device__ inline void scales_of(const uint8_t* block, int slab, int part, int slabs, int g, float2 factors,
                                 float scale[2]) {
  const int start = scales_at(slabs), shared = shared_at(slabs);
  uint32_t both = 0;
  float2 halves = factors;
  if constexpr (ARE_HALVES)
    halves = both_halves(block, start + slab * 32, g);
  else
    both = both_rows(block, start + (HAS_PARTS ? slab * 32 + part * 16 : slab * 16), g);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float half = r == 0 ? halves.x : halves.y;
    if constexpr (ARE_HALVES) {
      scale[r] = half;
    } else if constexpr (quant == Q4_K || quant == Q5_K) {
      scale[r] = byte_times(both, r, half);
    } else if constexpr (quant == Q2_K) {
      scale[r] = byte_times(both & 0x0F0F, r, half);
    } else if constexpr (quant == Q6_K || quant == Q3_K || quant == IQ4_XS) {
      scale[r] = signed_byte_times(both, r, half);
    } else if constexpr (quant == IQ3_XXS || quant == IQ3_S) {
      scale[r] = byte_times(both, r, half * (quant == IQ3_S ? 1.0f : 0.5f));
    } else if constexpr (quant == IQ2_S || quant == IQ1_M) {
      scale[r] = (byte_as_float((both >> 4 * part) & 0x0F0F, r) + 0.5f) * (half * 0.25f);
    } else if constexpr (quant == NVFP4) {
      // e4m3 to float: its bits are those of a float16 of another exponent.
      const uint32_t code = (both >> 8 * r) & 255;
      const float number = half_as_float((code & 128) << 8 | (code & 127) << 7) * 128.0f;  // 256, halved
      const int factor = shared + 4 * (2 * g + r);
      scale[r] = __fmaf_rn(number, at<float>(block, factor), number * at<float>(block, factor + 64));
    } else {  // MXFP4
      const uint32_t exponent = (both >> 8 * r) & 255;
      scale[r] = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    }
  }
}

__device__ inline void scales_of(const uint8_t* block, int slab, int part, int slabs, int g, float scale[2]) {
  scales_of(block, slab, part, slabs, g, scale_factors(block, slabs, g), scale);
}

// The minimums of rows 2g and 2g + 1 in part `line` of a superblock, to be multiplied by `minimum_factor`. Parts are
// counted over all slabs. A number has at most 11 significant bits, or 22 for UINT4.
__device__ inline float2 minimums_of(const uint8_t* block, int line, int slabs, int g) {
  const int start = scales_at(slabs);
  if constexpr (quant == Q4_1 || quant == Q5_1) {
    const float2 halves = both_halves(block, start + (slabs + line) * 32, g);
    return make_float2(-halves.x, -halves.y);
  }
  const int bytes = quant == Q2_K ? line * 16 : quant == UINT4 ? 32 * slabs + line * 16 : (slabs + line) * 16;
  uint32_t both = both_rows(block, start + bytes, g);
  if constexpr (quant == Q2_K) both = (both >> 4) & 0x0F0F;
  const float2 numbers = make_float2(byte_as_float(both, 0), byte_as_float(both, 1));
  if constexpr (quant != UINT4) return numbers;
  const float2 scales = both_halves(block, start + line * 32, g);
  return make_float2(numbers.x * scales.x, numbers.y * scales.y);
}

// What multiplies the minimums of rows 2g and 2g + 1.
__device__ inline float2 minimum_factors(const uint8_t* block, int slabs, int g) {
  if constexpr (quant == Q4_K || quant == Q5_K || quant == Q2_K)
    return both_halves(block, scales_at(slabs) + 32 * slabs + 32, g);
  return make_float2(1.0f, 1.0f);
}

// The minimums of rows 2g and 2g + 1 in part `line` of a superblock. factors: from `minimum_factors`.
__device__ inline float2 minimums_times(const uint8_t* block, int line, int slabs, int g, float2 factors) {
  if constexpr (quant == Q4_K || quant == Q5_K) {
    const uint32_t both = both_rows(block, scales_at(slabs) + (slabs + line) * 16, g);
    return make_float2(byte_times(both, 0, factors.x), byte_times(both, 1, factors.y));
  }
  const float2 numbers = minimums_of(block, line, slabs, g);
  return make_float2(numbers.x * factors.x, numbers.y * factors.y);
}

constexpr bool IS_SIGNED = OFFSET != 0 || quant == Q8_0 || quant == Q6_K || quant == Q4_0 || !MINIMUMS;

// A signed byte plus 32896, or a byte below 128 plus 128: bits of a float.
__device__ inline float code_plus(uint32_t word, int byte) {
  if constexpr (IS_SIGNED) return __uint_as_float(__byte_perm(word, 0x47000000, 0x7404 + 16 * byte));
  return __uint_as_float(__byte_perm(word, 0x43000000, 0x7044 + 256 * byte));
}
constexpr float CODE_OFFSET = IS_SIGNED ? 32896.0f : 128.0f;
// A scale of so many bits, times CODE_OFFSET, would lose what small codes need.
constexpr bool SCALES_ARE_LONG = quant == NVFP4;

// What multiplies the scales and minimums of rows 2g and 2g + 1 of a superblock.
struct Factors {
  float2 scales, minimums;
};
__device__ inline Factors factors_of(const uint8_t* block, int g, int slabs = 8) {
  return {scale_factors(block, slabs, g), minimum_factors(block, slabs, g)};
}

// left[s][..]: the left operand of bfloat16 products (see warpgroups.cuh), of columns 4s .. 4s + 3 of each eight.
__device__ inline void decode_slab(uint32_t left[2][4], const uint8_t* block, const Factors& factors, int slab, int g,
                                   int t, int slabs = 8) {
  uint32_t codes[4];
  decode(block, slab, slabs, g, t, codes);
  float scale[2];
  scales_of(block, slab, PARTS == 1 ? 0 : t / 2, slabs, g, factors.scales, scale);
  float2 minimum = {};
  if constexpr (MINIMUMS)
    minimum = minimums_times(block, PARTS == 1 ? slab : 2 * slab + t / 2, slabs, g, factors.minimums);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float factor = scale[r] * (1.0f / UNIT),
                offset = __fmaf_rn(-CODE_OFFSET, factor, r == 0 ? -minimum.x : -minimum.y);
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const uint32_t word = IS_SIGNED ? codes[2 * s + r] ^ 0x80808080 : codes[2 * s + r];
      float value[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        value[i] = SCALES_ARE_LONG ? (code_plus(word, i) - CODE_OFFSET) * factor
                                   : __fmaf_rn(code_plus(word, i), factor, offset);
      left[s][r] = two_bfloat16(value[0], value[1]);
      left[s][2 + r] = two_bfloat16(value[2], value[3]);
    }
  }
}

__device__ inline void decode_slab(uint32_t left[2][4], const uint8_t* block, int slab, int g, int t) {
  decode_slab(left, block, factors_of(block, g), slab, g, t);
}

// Formats without minimums whose codes bfloat16 has exactly. Their scales may multiply sums, not codes. That takes
// fewer operations, and no weight is rounded.
constexpr bool HAS_SMALL_CODES = quant == Q4_0 || quant == Q6_K;

// Two bytes below 128, from byte `first` on, as bfloat16 plus 128: they are the lowest bits of the mantissa.
__device__ inline uint32_t bytes_plus_128(uint32_t word, int first) {
  return __byte_perm(word, 0x43434343, 0x4140 + 0x0202 * (first / 2));
}

// left[s][..]: the codes of a slab as the left operand of bfloat16 products (see warpgroups.cuh): of columns
// 4s .. 4s + 3 of each eight, or by HALVES of column 16s + 4t and the three behind it.
__device__ inline void small_codes(uint32_t left[2][4], const uint8_t* block, int slab, int g, int t, int slabs = 8) {
  uint32_t codes[2][2];  // of row 2g + r in codes[s][r]
#pragma unroll
  for (int s = 0; s < 2; s++) {
    if constexpr (quant == Q6_K) {
      const uint2 lower = at<uint2>(block, slab * 256, (2 * s + t / 2) * 64 + 8 * g),
                  upper = at<uint2>(block, 256 * slabs + slab * 128 + s * 64 + 8 * g);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint32_t low = r == 0 ? lower.x : lower.y, high = r == 0 ? upper.x : upper.y;
        codes[s][r] = masked_or(__funnelshift_r(high, high, 2 * t - 4), 0x30303030, (low >> t % 2 * 4) & 0x0F0F0F0F);
      }
    } else {
      const uint2 words = at<uint2>(block, slab * 256, t * 64 + 8 * g);
      codes[s][0] = (words.x >> 4 * s) & 0x0F0F0F0F, codes[s][1] = (words.y >> 4 * s) & 0x0F0F0F0F;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t sum = bytes_plus_128(codes[i / 4][i % 2], i % 4 / 2 * 2),
                   minus_offset = quant == Q6_K ? 0xC320C320 : 0xC308C308;  // 128 + 32 or 128 + 8
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(left[i / 4][i % 4]) : "r"(sum), "r"(0x3F803F80), "r"(minus_offset));
  }
}
