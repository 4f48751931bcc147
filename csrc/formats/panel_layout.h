// How weights lie in memory once they are packed: the one layout that the kernels of every instruction set read.
//
// A *panel* is 16 rows of a matrix over all columns, contiguous, rows beyond the matrix zero. It is a run of
// *superblocks* of 256 columns (the last one may be shorter); a superblock holds up to eight *slabs* of 32 columns.
// What varies with the row is stored for 16 rows side by side, so that one 512-bit register holds it for all of them.
//
// Block formats. Of each slab there are 8 *lines* of 64 bytes once unpacked: byte 4r + i of line l is the unsigned code
// of row r, column 4l + i. A line is the operand of one vpdpbusd. Codes are stored in planes:
//   bytes    a line as it is (Q8_0: the signed weight xor 0x80)
//   nibbles  64 bytes hold lines 2j (low nibbles) and 2j + 1 (high nibbles)
//   pairs    64 bytes hold the 2-bit codes of lines 4j .. 4j + 3, the first in the lowest bits
//   bits     8 bytes hold bit 0 .. 63 of one line's bytes, byte n's in bit n (little endian)
// and then scales: one row of 16 entries for each slab (or half slab), then 16 halves d and, with minimums, 16 halves
// dmin. Offsets are for whole superblocks; a shorter one (only of formats whose own block is 32) has the same planes
// and scales for fewer slabs, and is padded to 64 bytes.
//
//   format  planes (bytes a superblock)        scales                                   value of code c
//   Q8_0    bytes 2048                         half d per slab                          d * (c - 128)
//   Q4_0    nibbles 2048                       half d per slab                          d * (c - 8)
//   IQ4_NL  nibbles 2048                       half d per slab                          d * table[c]
//   MXFP4   nibbles 2048                       u8 exponent e per slab                   2^(e - 128) * table[c]
//   Q4_K    nibbles 2048                       u8 s, u8 n per slab; d, dmin             d * s * c - dmin * n
//   Q5_K    nibbles 2048, bits 512             as Q4_K                                  as Q4_K, c has five bits
//   Q6_K    nibbles 2048, pairs 1024           s8 s per half slab; d                    d * s * (c - 32)
//   IQ4_XS  nibbles 2048                       s8 s per slab; d                         d * s * table[c]
//   Q3_K    pairs 1024, bits 512               s8 s per half slab; d                    d * s * (c - 4)
//   IQ3_XXS nibbles 2048                       u8 s per slab; d                        d / 2 * s * table[c]
//   IQ3_S   nibbles 2048                       u8 s per slab; d                        d * s * table[c]
//   IQ2_S   pairs 1024, bits 512               u8 per slab (low: s of the first half,  d / 4 * (s + 1/2) * table[c]
//                                              high: of the second); d
//   IQ1_M   pairs 1024, deltas 64              as IQ2_S                                d / 4 * (s + 1/2) * (8 * pair +
//                                                                                     2 * delta - 9)
//   NVFP4   nibbles 2048                       E4M3 s per half slab; float d, float r   (d + r) * s / 2 * table[c]
//   Q4_1    nibbles 2048                       half d, half m per slab: first all d      d * c + m
//   Q5_1    nibbles 2048, bits 512             as Q4_1                                  as Q4_1, c has five bits
//   UINT4   nibbles 2048                       half d, u8 z per slab: first all d        d * (c - z)
//   FP8     bytes 1024, float d; twice         float d per four slabs                   d * e4m3(c)
//   Q2_K    pairs 1024                         u8 per half slab (low: s, high: n); d, dmin   d * s * c - dmin * n
//   F32     [32][16] floats a slab             -                                        as stored
//   F16     [32][16] halves a slab             -                                        as stored
//   BF16    [16][16][2] bf16 a slab: columns 2i and 2i + 1 of a row side by side        as stored
//
// IQ2_XXS and IQ2_XS are stored as IQ2_S is, IQ1_S as IQ1_M is, and FP4 as NVFP4 is, whose d is 1 and r 0. Deltas: 2 bytes have a bit for each row, for lines 2j
// and 2j + 1 of a slab.
//
// F32, F16 and BF16 have no superblocks: a panel is a run of slabs, columns beyond the matrix zero.
#pragma once

#include "formats/quant_format.h"

namespace ktqueue {

inline constexpr size_t kPanelRows = 16;
inline constexpr size_t kSlab = kGroup;  // columns
inline constexpr size_t kSuperblock = 256;
inline constexpr size_t kSlabs = kSuperblock / kSlab;  // slabs of a whole superblock

constexpr size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// The values of codes. Of IQ3_XXS they are halved; the zeros of IQ2 do not occur.
inline constexpr int8_t kIQ3XXSValues[16] = {-31, -26, -22, -18, -14, -10, -6, -2, 2, 6, 10, 14, 18, 22, 26, 31};
inline constexpr int8_t kIQ3SValues[16] = {-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15};
inline constexpr int8_t kIQ2Values[16] = {8, 25, 43, 0, -8, -25, -43, 0};

// The format that has the same panels, for formats whose panels differ in nothing.
constexpr Quant panel_format(Quant quant) {
    switch (quant) {
        case Quant::IQ2_XXS:
        case Quant::IQ2_XS:
            return Quant::IQ2_S;
        case Quant::IQ1_S:
            return Quant::IQ1_M;
        case Quant::FP4:
            return Quant::NVFP4;
        default:
            return quant;
    }
}

constexpr bool is_float(Quant quant) {
    return quant == Quant::F32 || quant == Quant::F16 || quant == Quant::BF16;
}

// Whether weights are multiplied by activations in floats only: their codes are not whole numbers.
constexpr bool takes_floats(Quant quant) {
    return is_float(quant) || quant == Quant::FP8;
}

// Of FP8: the slabs that share a scale, and their bytes with it.
inline constexpr size_t kFP8Slabs = 4, kFP8Bytes = kFP8Slabs * 512 + 64;

// Bytes of the planes and scales of one slab, without the part that a superblock stores once.
constexpr size_t slab_bytes(Quant quant) {
    switch (panel_format(quant)) {
        case Quant::F32:
            return 2048;
        case Quant::F16:
        case Quant::BF16:
            return 1024;
        case Quant::Q8_0:
            return 512 + 32;
        case Quant::Q4_0:
        case Quant::IQ4_NL:
            return 256 + 32;
        case Quant::MXFP4:
            return 256 + 16;
        case Quant::Q4_K:
            return 256 + 32;
        case Quant::Q5_K:
            return 256 + 64 + 32;
        case Quant::Q6_K:
            return 256 + 128 + 32;
        case Quant::IQ4_XS:
        case Quant::IQ3_XXS:
        case Quant::IQ3_S:
            return 256 + 16;
        case Quant::IQ2_S:
            return 128 + 64 + 16;
        case Quant::IQ1_M:
            return 128 + 8 + 16;
        case Quant::NVFP4:
            return 256 + 32;
        case Quant::Q4_1:
            return 256 + 64;
        case Quant::Q5_1:
            return 256 + 64 + 64;
        case Quant::UINT4:
            return 256 + 48;
        case Quant::FP8:
            return kFP8Bytes / kFP8Slabs;
        case Quant::Q3_K:
            return 128 + 64 + 32;
        case Quant::Q2_K:
            return 128 + 32;
        default:
            return 0;
    }
}

// Bytes of the part that a superblock stores once: d and dmin, or d and r.
constexpr size_t superblock_extra(Quant quant) {
    switch (panel_format(quant)) {
        case Quant::NVFP4:
            return 128;
        case Quant::Q4_K:
        case Quant::Q5_K:
        case Quant::Q2_K:
            return 64;
        case Quant::Q6_K:
        case Quant::IQ4_XS:
        case Quant::IQ3_XXS:
        case Quant::IQ3_S:
        case Quant::IQ2_S:
        case Quant::IQ1_M:
        case Quant::Q3_K:
            return 32;
        default:
            return 0;
    }
}

// Bytes of a superblock of `slabs` slabs.
constexpr size_t superblock_bytes(Quant quant, size_t slabs = kSlabs) {
    return round_up(slabs * slab_bytes(quant) + superblock_extra(quant), 64);
}

// Bytes of a panel of `columns` columns; a multiple of 64.
constexpr size_t panel_bytes(Quant quant, size_t columns) {
    const size_t slabs = (columns + kSlab - 1) / kSlab;
    if (is_float(quant)) return slabs * slab_bytes(quant);
    const size_t rest = slabs % kSlabs;
    return slabs / kSlabs * superblock_bytes(quant) + (rest ? superblock_bytes(quant, rest) : 0);
}

// Panels of a matrix of `rows` rows.
constexpr size_t panel_count(size_t rows) {
    return (rows + kPanelRows - 1) / kPanelRows;
}

}  // namespace ktqueue
