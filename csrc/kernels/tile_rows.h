// Rows for block formats on tiles: bf16, times a power of two, columns in the order that kernels/bf16_weights.h gives to weights.
// Included only by translation units of one instruction set, after isa/lanes_avx512.h and isa/vector_avx512.h; internal linkage.
#pragma once

#include "kernels/mid_kernels.h"

namespace ktqueue {
namespace {

// Sixteen floats to bf16 in their upper halves; nearest, ties to even. What is not finite becomes a NaN, so that it is not
// clamped on its way.
inline __m512i round_to_bf16(Floats x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 bad = _mm512_fpclass_ps_mask(x, 0x99);  // infinities, NaN
    return _mm512_mask_or_epi32(rounded, bad, bits, _mm512_set1_epi32(0x400000));
}

inline void shuffle_slab(const float* x, float unit, uint16_t* out) {
    // Of each 8 columns 0, 2, 4, 6, 1, 3, 5, 7: words 2c + 1 of the two registers.
    alignas(64) static constexpr uint16_t kOrder[32] = {1,  5,  9,  13, 3,  7,  11, 15, 17, 21, 25, 29, 19, 23, 27, 31,
                                                        33, 37, 41, 45, 35, 39, 43, 47, 49, 53, 57, 61, 51, 55, 59, 63};
    const __m512i low = round_to_bf16(times(load_floats(x), splat_float(unit)));
    const __m512i high = round_to_bf16(times(load_floats(x + 16), splat_float(unit)));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(low, _mm512_load_si512(kOrder), high));
}

void shuffle(const float* x, size_t columns, float unit, uint16_t* out) {
    for (size_t c = 0; c < columns; c += kSlab) shuffle_slab(x + c, unit, out + c);
}

// 1 / (1 + e^-x), off by 1e-4 of it at most: little beside what bf16 takes away.
inline Wide quick_sigmoid(Wide x) {
    const Wide t = multiply(x, splat_wide(-1.44269504f));
    const Wide n = _mm512_roundscale_ps(t, 8);  // nearest, no exception
    const Wide f = subtract(t, n);
    Wide power = splat_wide(0.00961813f);  // 2^f, Taylor's series as far as f^4
    for (const float c : {0.05550411f, 0.24022651f, 0.69314718f, 1.0f}) power = multiply_add(power, f, splat_wide(c));
    return _mm512_rcp14_ps(add(splat_wide(1.0f), _mm512_scalef_ps(power, n)));
}

inline void quick_silu(const GateTask& task) {
    for_lanes(task, [](Wide g, Wide u) { return multiply(multiply(g, quick_sigmoid(g)), u); });
}

template <GateKernel Gate>
void mid_tile_rows(const MidTask& task) {
    mid_rows<Gate>(task, kSlab * sizeof(uint16_t), [&](const float* mid, uint8_t* out) {
        shuffle_slab(mid, task.unit, reinterpret_cast<uint16_t*>(out));
    });
}

}  // namespace
}  // namespace ktqueue
