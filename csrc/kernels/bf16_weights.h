// A slab of a block format as a tile of bf16: what AMX multiplies. Included only by translation units of one instruction
// set, after isa/lanes_avx512.h; internal linkage.
//
// AVX-512 has no arithmetic for bf16, but it has some for IEEE halves (FP16), 32 a register. A code becomes a half
// by its bits alone, is multiplied by its scale, and the half is cut to bf16: its exponent and the upper 7 bits of its
// mantissa, shifted, are those of a bf16 of 2^-16 times the value. A half of 0 comes out as 2^-15 of the least normal
// one's unit, 2^-30 of the largest.
//
// So weights go through halves times 2^16 / unit, a power of two that leaves the largest of the matrix below 2^15
// (tile_unit()), and x is multiplied by `unit`. Cutting would make weights 0.25 % too small on average; the scales
// are made larger by that, which nearly amounts to rounding: what bf16 holds exactly stays as it is.
//
// Columns lie in the tile as the bytes of a line give them: the 16-bit words of line l hold columns 4l and 4l + 2 of a row
// in their lower bytes, 4l + 1 and 4l + 3 in their upper ones. So of each 8 columns 0, 2, 4, 6 come first, then 1, 3, 5, 7,
// in x too (kernels/tile_rows.h).
//
// `Half` is what has the arithmetic: isa/half_avx512.h.
#pragma once

#include "kernels/panel_format.h"

namespace ktqueue {
namespace {

constexpr float kAgainstCutting = 1.0025f;

// ---- bits of halves

constexpr uint16_t half_bits(int value) {  // of a small whole number
    const unsigned magnitude = static_cast<unsigned>(value < 0 ? -value : value);
    if (magnitude == 0) return 0;
    unsigned exponent = 0;
    while (magnitude >> (exponent + 1)) ++exponent;
    const unsigned mantissa = (magnitude << (10 - exponent)) & 1023u;
    return static_cast<uint16_t>((value < 0 ? 0x8000u : 0u) | (exponent + 15) << 10 | mantissa);
}

// What nibbles stand for, twice: the index of a lookup has five bits.
struct HalfTable {
    alignas(64) uint16_t halves[32];
    constexpr explicit HalfTable(const int8_t (&values)[16]) : halves() {
        for (size_t i = 0; i < 32; ++i) halves[i] = half_bits(values[i % 16]);
    }
};

// Formats whose code is a nibble, and that have no minimums: by a table.
constexpr bool has_table(Quant quant) {
    return quant == Quant::Q4_0 || quant == Quant::IQ4_NL || quant == Quant::IQ4_XS || quant == Quant::MXFP4;
}

constexpr HalfTable half_table(Quant quant) {
    constexpr int8_t kQ4Values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return quant == Quant::Q4_0 ? HalfTable(kQ4Values) : HalfTable(quant == Quant::MXFP4 ? kMXFP4Values : kIQ4Values);
}

inline __m512i words(int value) {
    return _mm512_set1_epi16(static_cast<int16_t>(value));
}

inline __m512i masked_with(__m512i a, __m512i mask, __m512i bits) {  // a & mask | bits
    return _mm512_ternarylogic_epi32(a, mask, bits, 0xea);
}

inline __m512i cut_to_bf16(__m512i halves) {
    return masked_with(_mm512_srai_epi16(halves, 3), words(0x8fff), words(0x3000));
}

inline __m256i to_halves(Floats a) {
    return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// One half for each row to both of the row's words.
inline __m512i for_rows(__m256i halves) {
    const __m512i wide = _mm512_cvtepu16_epi32(halves);
    return _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
}

// ---- a slab

// The tile of one slab of a superblock of `slabs`: 1 KB at `tile`, on a cache line.
template <class Half, class Format>
void unpack_slab(const uint8_t* block, size_t slabs, size_t slab, float unit, uint8_t* tile) {
    constexpr ActivationKind kKind = activation_kind(Format::kQuant);
    constexpr size_t kHalves = kKind.halves ? 2 : 1;
    constexpr bool kNibbles = Format::kQuant == Quant::Q4_K;
    const Format format(block, slabs);
    const float weight_unit = 0x1p16f / unit * kAgainstCutting;
    __m512i factors[kHalves], offsets[kHalves];
#pragma GCC unroll 2
    for (size_t h = 0; h < kHalves; ++h) {
        const __m256i factor = to_halves(times(format.scale(slab, h), splat_float(weight_unit)));
        factors[h] = for_rows(factor);
        if constexpr (Format::kMinimums) {
            // Nibbles are read as 16 + code.
            Floats offset = times(format.minimum(slab, h), splat_float(-weight_unit));
            if constexpr (kNibbles) offset = fused_negative(_mm512_cvtph_ps(factor), splat_float(16), offset);
            offsets[h] = for_rows(to_halves(offset));
        }
    }
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
        const __m512i factor = factors[kKind.halves ? j / 2 : 0];
        uint8_t* out = tile + 256 * j;  // four rows: lower and upper bytes of even, of odd lines
        if constexpr (kNibbles) {
            const __m512i codes = load_bytes(block + slab * 256 + j * 64);
            const auto row = [&](__m512i shifted) {  // a nibble at bits 6 to 9 of a half of 16 to 31
                return cut_to_bf16(Half::fused(masked_with(shifted, words(0x03c0), words(0x4c00)), factor, offsets[0]));
            };
            store_bytes(out, row(_mm512_slli_epi16(codes, 6)));
            store_bytes(out + 64, row(_mm512_slli_epi16(codes, 2)));
            store_bytes(out + 128, row(_mm512_srli_epi16(codes, 2)));
            store_bytes(out + 192, row(_mm512_srli_epi16(codes, 6)));
        } else if constexpr (has_table(Format::kQuant)) {
            static constexpr HalfTable kTable = half_table(Format::kQuant);
            const __m512i codes = load_bytes(block + slab * 256 + j * 64);
            const __m512i table = _mm512_load_si512(kTable.halves);
            const auto row = [&](__m512i shifted) {
                return cut_to_bf16(Half::times(_mm512_permutexvar_epi16(shifted, table), factor));
            };
            store_bytes(out, row(codes));
            store_bytes(out + 64, row(_mm512_srli_epi16(codes, 4)));
            store_bytes(out + 128, row(_mm512_srli_epi16(codes, 8)));
            store_bytes(out + 192, row(_mm512_srli_epi16(codes, 12)));
        } else {
            Bytes lines[2];
            format.lines(slab, j, lines[0], lines[1]);
            const __m512i zero =
                words(0x6400 + kKind.offset);  // 1024 and the offset: a byte is the end of its mantissa
            const auto row = [&](__m512i half) {
                const __m512i code = Half::minus(half, zero);
                if constexpr (Format::kMinimums) {
                    return cut_to_bf16(Half::fused(code, factor, offsets[kKind.halves ? j / 2 : 0]));
                } else {
                    return cut_to_bf16(Half::times(code, factor));
                }
            };
#pragma GCC unroll 2
            for (size_t i = 0; i < 2; ++i) {
                store_bytes(out + 64 * i, row(masked_with(lines[i], words(0x00ff), words(0x6400))));
                store_bytes(out + 64 * i + 128, row(_mm512_or_si512(_mm512_srli_epi16(lines[i], 8), words(0x6400))));
            }
        }
    }
}

}  // namespace
}  // namespace ktqueue
