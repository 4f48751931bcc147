// The weight formats: names, block sizes, and the memory layout of each block. Knows no packed layout.
//
// Layouts are those of GGUF files (little endian, packed). A *group* is 32 consecutive weights of a row, the unit in
// which kernels decode. `half` is an IEEE binary16. Sources: the GGUF specification and the `gguf` Python package.
//
//   format  weights  bytes  fields (offset: type name)                              weight i, in group g = i / 32
//   F32        1       4    0: float                                                as stored
//   F16        1       2    0: half                                                 as stored
//   BF16       1       2    0: upper 16 bits of a float                             as stored
//   Q4_0      32      18    0: half d, 2: u8 q[16]                                  d * (nibble - 8)
//   Q8_0      32      34    0: half d, 2: s8 q[32]                                  d * q[i]
//   Q2_K     256      84    0: u8 s[16], 16: u8 q[64], 80: half d, 82: half m       d * low * two - m * high
//   Q3_K     256     110    0: u8 h[32], 32: u8 q[64], 96: u8 s[12], 108: half d    d * (scale - 32) * (three - 4)
//   Q4_K     256     144    0: half d, 2: half m, 4: u8 s[12], 16: u8 q[128]        d * scale[g] * nibble - m * min[g]
//   Q5_K     256     176    as Q4_K, but 16: u8 h[32], 48: u8 q[128]                d * scale[g] * five - m * min[g]
//   Q6_K     256     210    0: u8 l[128], 128: u8 h[64], 192: s8 c[16],             d * c[i / 16] * (six - 32)
//                           208: half d
//   IQ4_NL    32      18    0: half d, 2: u8 q[16]                                  d * kIQ4Values[nibble]
//   IQ4_XS   256     136    0: half d, 2: u16 t, 4: u8 s[4], 8: u8 q[128]           d * (scale[g] - 32) *
//                                                                                     kIQ4Values[nibble]
//   MXFP4     32      17    0: u8 e, 1: u8 q[16]                                    2^(e - 128) * kMXFP4Values[nibble]
//   Q4_1      32      20    0: half d, 2: half m, 4: u8 q[16]                      d * nibble + m
//   Q5_1      32      24    0: half d, 2: half m, 4: u32 h, 8: u8 q[16]            d * five + m
//   UINT4     32      19    0: half d, 2: u8 z, 3: u8 q[16]                        d * (nibble - z)
//   FP8      128     132    0: float d, 4: u8 q[128]                               d * e4m3(q[i])
//   NVFP4     64      36    0: u8 e[4], 4: u8 q[32]                                 e4m3(e[i / 16]) / 2 *
//                                                                                     kMXFP4Values[nibble]
//   FP4       64      44    0: float d, 4: float r, 8: u8 e[4], 12: u8 q[32]        (d + r) * e4m3(e[i / 16]) / 2 *
//                                                                                     kMXFP4Values[nibble]
//   IQ2_XXS  256      66    0: half d, 2: {u8 index[4], u32 signs and scale}[8]     d / 8 * scale * sign * {8, 25, 43}
//   IQ2_XS   256      74    0: half d, 2: u16 index and signs[32], 66: u8 s[8]      as IQ2_XXS
//   IQ2_S    256      82    0: half d, 2: u8 index[32], 34: u8 signs[32],           as IQ2_XXS
//                           66: u8 high[8], 74: u8 s[8]
//   IQ3_XXS  256      98    0: half d, 2: u8 index[64], 66: u32 signs and scale[8]  d / 4 * scale * sign * {4, .., 62}
//   IQ3_S    256     110    0: half d, 2: u8 index[64], 66: u8 high[8],             d * scale * sign * {1, 3, .., 15}
//                           74: u8 signs[32], 106: u8 s[4]
//   IQ1_S    256      50    0: half d, 2: u8 index[32], 34: u16 h[8]                d / 8 * scale * (8 * three +- 1)
//   IQ1_M    256      56    0: u8 index[32], 32: u8 h[16], 48: u16 s[4]             as IQ1_S
//
// UINT4, FP8 and FP4 are not GGUF's: they hold weights of quantised Hugging Face folders (ktqueue's loader makes them).
//
// Q4_0, Q4_1, Q5_1, UINT4, IQ4_NL, MXFP4: weights 0..15 are the low nibbles of q, 16..31 the high ones. Q5_1's fifth bit
//   of weight i is bit i of h.
// Q2_K: two, weight j of group g: bits 2(g % 4) and up of q[32(g / 4) + j]. low and high: nibbles of s[i / 16].
// Q3_K: the low two bits of three as Q2_K's two; its third bit, of weight j of group g, is bit g of h[j].
//   s packs sixteen 6-bit scales, one for 16 weights. Scale c has its low 4 bits in s[c % 8] (the low nibble for c < 8,
//   else the high one) and its upper 2 bits in bits 2(c / 4) and up of s[8 + c % 4].
// Q4_K, Q5_K: groups 2n and 2n+1 share the 32 bytes q[32n ..]: byte j holds weight j of group 2n in its low nibble and
//   that of group 2n+1 in its high nibble. Q5_K's fifth bit of weight j of group g is bit g of h[j].
//   s packs eight 6-bit scales and mins. For g < 4, scale = s[g] & 63 and min = s[g+4] & 63. For g >= 4 the low 4 bits
//   are the nibbles of s[g+4] (low: scale, high: min) and the upper 2 bits the top bits of s[g-4] and of s[g].
// Q6_K: the block has two halves n of four groups k. Weight j of group k has its low 4 bits in l[64n + 32(k % 2) + j]
//   (the low nibble for k < 2, else the high one) and its upper 2 bits in bits 2k and 2k+1 of h[32n + j].
// IQ4_XS: the nibbles of group g are in q[16g ..], in Q4_0's order. Its scale has its low 4 bits in s[g / 2] (the low
//   nibble for even g, else the high one) and its upper 2 bits in bits 2g and 2g+1 of t.
// IQ1, IQ2, IQ3: an index chooses 8 weights (IQ3: 4) from a grid, formats/grids.h. Scales are odd: 2s + 1, where s has
//   four bits (IQ1: three). grid_block.cpp has the places of bits.
// NVFP4: sub-block k of 16 weights has the 8 bytes q[8k ..], first the low nibbles, then the high ones. e has no sign; 127
//   is 0.
// FP4: as NVFP4, but 127 is NaN. All blocks of a row have the same d and r. r has up to 20 bits and d + r up to 44,
//   so that its product with a scale is rounded once: it can stand for a division.
// MXFP4: the scale is half of what the exponent byte of the OCP microscaling format says and the values are twice those
//   of its E2M1, so both are whole. e = 255, NaN in that format, is 2^127 here as in the `gguf` package.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ktqueue {

enum class Quant : uint8_t {
    F32,
    F16,
    BF16,
    Q4_0,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    IQ1_S,
    IQ1_M,
    NVFP4,
    Q4_1,
    Q5_1,
    UINT4,
    FP8,
    FP4
};

inline constexpr size_t kQuantCount = 26;
inline constexpr size_t kGroup = 32;  // weights

// The values of nibbles: of IQ4_NL and IQ4_XS, and of MXFP4 (twice the E2M1 values; the second 0 is -0 there).
inline constexpr int8_t kIQ4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr int8_t kMXFP4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct QuantFormat {
    const char* name;
    size_t block_weights;
    size_t block_bytes;
};

const QuantFormat& quant_format(Quant quant);

// Throws std::invalid_argument with a list of the known names.
Quant parse_quant(std::string_view name);

// Bytes of a row of `columns` weights. Throws std::invalid_argument unless `columns` is a positive multiple of the
// block.
size_t row_bytes(Quant quant, size_t columns);

// Converts `count` weights (a multiple of the block) to floats. Portable C++, for every format.
using DequantizeKernel = void (*)(const uint8_t* data, size_t count, float* target);
DequantizeKernel dequantize_kernel(Quant quant);

}  // namespace ktqueue
