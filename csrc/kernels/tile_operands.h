// Both operands of AMX for block formats: a slab of weights as a tile of bf16, and rows of x in the same column order.
// Included only by translation units of one instruction set, after isa/lanes_avx512.h and isa/vector_avx512.h; internal
// linkage.
//
// AVX-512 has no arithmetic for bf16, but AVX512-FP16 has it for IEEE halves, 32 in a register. So a code becomes a
// half by bit operations, the half is multiplied by its scale, and is then cut to bf16. The exponent of the half and
// the upper 7 bits of its mantissa, shifted, are those of a bf16 of 2^-16 times the value. A half of 0 becomes 2^-15 of
// the unit of the smallest normal half, or 2^-30 of the largest.
//
// Invariants:
// - Weights in halves are multiplied by 2^16 / unit, a power of two that keeps the largest of the matrix below 2^15
//   (tile_unit()). x is multiplied by `unit`.
// - Cutting alone would make weights 0.25 % too small on average, so scales are made larger by that. This is nearly
//   rounding: what bf16 holds exactly stays as it is. In formats whose scales may be few, errors of cutting do not
//   average out, so their weights are rounded (rounds_weights()).
// - Columns are in the tile as the bytes of a line give them. The 16-bit words of line l hold columns 4l and 4l + 2 of
//   a row in their lower bytes, 4l + 1 and 4l + 3 in their upper ones. So each 8 columns are in the order 0, 2, 4, 6,
//   1, 3, 5, 7, and x uses the same order (kOrder).
//
// `Half` provides the arithmetic: isa/tiles_amx.h.
#pragma once

#include "kernels/expert_kernels.h"
#include "kernels/float_views.h"
#include "kernels/panel_views.h"

namespace ktqueue {
namespace {

// ---- weights

constexpr float kCuttingCorrection = 1.0025f;

// ---- bits of halves

constexpr uint16_t half_bits(int value) {  // the half of a small whole number
    const unsigned magnitude = static_cast<unsigned>(value < 0 ? -value : value);
    if (magnitude == 0) return 0;
    unsigned exponent = 0;
    while (magnitude >> (exponent + 1)) ++exponent;
    const unsigned mantissa = (magnitude << (10 - exponent)) & 1023u;
    return static_cast<uint16_t>((value < 0 ? 0x8000u : 0u) | (exponent + 15) << 10 | mantissa);
}

// The values of nibbles, stored twice because the index of the lookup has five bits.
struct HalfTable {
    alignas(64) uint16_t halves[32];
    constexpr explicit HalfTable(const int8_t (&values)[16]) : halves() {
        for (size_t i = 0; i < 32; ++i) halves[i] = half_bits(values[i % 16]);
    }
};

// Formats whose code is a nibble and that have no minimums: decoded by a table.
constexpr bool has_table(Quant quant) {
    return quant == Quant::Q4_0 || quant == Quant::IQ4_NL || quant == Quant::IQ4_XS || quant == Quant::MXFP4;
}

// Formats of folders in which a whole matrix may have a single factor.
constexpr bool rounds_weights(Quant quant) {
    return quant == Quant::FP8 || quant == Quant::NVFP4;
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

template <bool Rounds = false>
inline __m512i cut_to_bf16(__m512i halves) {
    if constexpr (Rounds) halves = _mm512_add_epi16(halves, words(4));
    return masked_with(_mm512_srai_epi16(halves, 3), words(0x8fff), words(0x3000));
}

inline __m256i to_halves(Floats a) {
    return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Copies one half per row to both words of that row.
inline __m512i for_rows(__m256i halves) {
    const __m512i wide = _mm512_cvtepu16_epi32(halves);
    return _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
}

// ---- a slab

// Writes the tile of one slab, from a superblock of `slabs` slabs: 1 KB at `tile`, aligned to a cache line.
template <class Half, class Format>
void unpack_slab(const uint8_t* block, size_t slabs, size_t slab, float unit, uint8_t* tile) {
    constexpr ActivationKind kKind = activation_kind(Format::kQuant);
    constexpr size_t kHalves = kKind.halves ? 2 : 1;
    constexpr bool kNibbles = Format::kQuant == Quant::Q4_K;
    constexpr bool kZeros = Format::kQuant == Quant::UINT4;  // subtracted from codes, which halves do exactly
    constexpr bool kE4M3 = Format::kQuant == Quant::FP8;     // codes are numbers; their bits are those of 2^-8 of them
    const Format format(block, slabs);
    constexpr bool kRounds = rounds_weights(Format::kQuant);
    const float weight_unit = 0x1p16f / unit * (kRounds ? 1 : kCuttingCorrection) * (kE4M3 ? 0x1p8f : 1);
    __m512i factors[kHalves], offsets[kHalves];
#pragma GCC unroll 2
    for (size_t h = 0; h < kHalves; ++h) {
        const __m256i factor = to_halves(times(format.scale(slab, h), splat_float(weight_unit)));
        factors[h] = for_rows(factor);
        if constexpr (Format::kMinimums && !kZeros) {
            // Nibbles are read as 16 + code.
            Floats offset = times(format.minimum(slab, h), splat_float(-weight_unit));
            if constexpr (kNibbles) offset = fused_negative(_mm512_cvtph_ps(factor), splat_float(16), offset);
            offsets[h] = for_rows(to_halves(offset));
        }
    }
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
        const __m512i factor = factors[kKind.halves ? j / 2 : 0];
        uint8_t* out = tile + 256 * j;  // four rows: lower and upper bytes of even, then of odd lines
        if constexpr (kNibbles) {
            const __m512i codes = load_bytes(block + slab * 256 + j * 64);
            const auto row = [&](__m512i shifted) {  // puts a nibble at bits 6 to 9 of a half from 16 to 31
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
        } else if constexpr (kE4M3) {
            Bytes lines[2];
            format.lines(slab, j, lines[0], lines[1]);
            const auto row = [&](__m512i upper) {  // the bits in the upper bytes of words, below the sign
                const __m512i half = _mm512_and_si512(_mm512_srai_epi16(upper, 1), words(0xbf80));
                return cut_to_bf16<kRounds>(Half::times(half, factor));
            };
#pragma GCC unroll 2
            for (size_t i = 0; i < 2; ++i) {
                store_bytes(out + 64 * i, row(_mm512_slli_epi16(lines[i], 8)));
                store_bytes(out + 64 * i + 128, row(lines[i]));
            }
        } else {
            Bytes lines[2];
            format.lines(slab, j, lines[0], lines[1]);
            // 1024 plus the offset: the code is the low end of the mantissa.
            __m512i zero = words(0x6400 + kKind.offset);
            if constexpr (kZeros)
                zero = for_rows(_mm256_or_si256(
                    _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(format.row_zeros(slab)))),
                    _mm256_set1_epi16(0x6400)));
            const auto row = [&](__m512i half) {
                const __m512i code = Half::minus(half, zero);
                if constexpr (Format::kMinimums && !kZeros) {
                    return cut_to_bf16(Half::fused(code, factor, offsets[kKind.halves ? j / 2 : 0]));
                } else {
                    return cut_to_bf16<kRounds>(Half::times(code, factor));
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

// ---- rows of x: bf16, times a power of two

// Rounds sixteen floats to bf16, in their upper halves; nearest, ties to even. Infinities become NaN, so that no later
// step clamps them.
inline __m512i round_to_bf16(Floats x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 bad = _mm512_fpclass_ps_mask(x, 0x99);  // infinities, NaN
    return _mm512_mask_or_epi32(rounded, bad, bits, _mm512_set1_epi32(0x400000));
}

inline void shuffle_slab(const float* x, float unit, uint16_t* out) {
    // Of each 8 columns the order 0, 2, 4, 6, 1, 3, 5, 7: words 2c + 1 of the two registers.
    alignas(64) static constexpr uint16_t kOrder[32] = {1,  5,  9,  13, 3,  7,  11, 15, 17, 21, 25, 29, 19, 23, 27, 31,
                                                        33, 37, 41, 45, 35, 39, 43, 47, 49, 53, 57, 61, 51, 55, 59, 63};
    const __m512i low = round_to_bf16(times(load_floats(x), splat_float(unit)));
    const __m512i high = round_to_bf16(times(load_floats(x + 16), splat_float(unit)));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(low, _mm512_load_si512(kOrder), high));
}

void shuffle(const float* x, size_t columns, float unit, uint16_t* out) {
    for (size_t c = 0; c < columns; c += kSlab) shuffle_slab(x + c, unit, out + c);
}

// 1 / (1 + e^-x) with a relative error of at most 1e-4, small compared with bf16's.
inline Wide quick_sigmoid(Wide x) {
    const Wide t = multiply(x, splat_wide(-1.44269504f));
    const Wide n = _mm512_roundscale_ps(t, 8);  // nearest, no exception
    const Wide f = subtract(t, n);
    Wide power = splat_wide(0.00961813f);  // 2^f, Taylor's series up to f^4
    for (const float c : {0.05550411f, 0.24022651f, 0.69314718f, 1.0f}) power = multiply_add(power, f, splat_wide(c));
    return _mm512_rcp14_ps(add(splat_wide(1.0f), _mm512_scalef_ps(power, n)));
}

inline void quick_silu(const GateTask& task) {
    for_lanes(task, [](Wide g, Wide u) { return multiply(multiply(g, quick_sigmoid(g)), u); });
}

template <GateKernel Gate>
void activate_tile_rows(const ActivationTask& task) {
    activate_rows<Gate>(task, kSlab * sizeof(uint16_t), [&](const float* activated, uint8_t* out) {
        shuffle_slab(activated, task.unit, reinterpret_cast<uint16_t*>(out));
    });
}

}  // namespace
}  // namespace ktqueue
