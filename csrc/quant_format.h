// The weight formats: names, block sizes, and the memory layout of each block. Knows no kernel.
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
//   Q4_K     256     144    0: half d, 2: half m, 4: u8 s[12], 16: u8 q[128]        d * scale[g] * nibble - m * min[g]
//   Q5_K     256     176    as Q4_K, but 16: u8 h[32], 48: u8 q[128]                d * scale[g] * five - m * min[g]
//   Q6_K     256     210    0: u8 l[128], 128: u8 h[64], 192: s8 c[16],             d * c[i / 16] * (six - 32)
//                           208: half d
//
// Q4_0: weights 0..15 are the low nibbles of q, 16..31 the high ones.
// Q4_K, Q5_K: groups 2n and 2n+1 share the 32 bytes q[32n ..]: byte j holds weight j of group 2n in its low nibble and
//   that of group 2n+1 in its high nibble. Q5_K's fifth bit of weight j of group g is bit g of h[j].
//   s packs eight 6-bit scales and mins. For g < 4, scale = s[g] & 63 and min = s[g+4] & 63. For g >= 4 the low 4 bits
//   are the nibbles of s[g+4] (low: scale, high: min) and the upper 2 bits the top bits of s[g-4] and of s[g].
// Q6_K: the block has two halves n of four groups k. Weight j of group k has its low 4 bits in l[64n + 32(k % 2) + j]
//   (the low nibble for k < 2, else the high one) and its upper 2 bits in bits 2k and 2k+1 of h[32n + j].
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ktqueue {

enum class Quant : uint8_t { F32, F16, BF16, Q4_0, Q8_0, Q4_K, Q5_K, Q6_K };

inline constexpr size_t kQuantCount = 8;
inline constexpr size_t kGroup = 32;  // weights

struct QuantFormat {
    const char* name;
    size_t block_weights;
    size_t block_bytes;
};

const QuantFormat& quant_format(Quant quant);

// Throws std::invalid_argument that lists the known names.
Quant parse_quant(std::string_view name);

// Bytes of a row of `columns` weights. Throws std::invalid_argument unless `columns` is a positive multiple of the
// block.
size_t row_bytes(Quant quant, size_t columns);

}  // namespace ktqueue
