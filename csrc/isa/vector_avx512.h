// Sixteen floats in one AVX-512 register: what the gate kernels need, rounded as in isa/vector_avx2.h.
// Included only by translation units of one instruction set, after isa/vector_avx2.h; internal linkage.
#pragma once

#include <initializer_list>

#include "isa/vector_avx2.h"

namespace ktqueue {
namespace {

using Wide = __m512;
constexpr size_t kWide = 16;

inline Wide load_wide(const float* source) {
    return _mm512_loadu_ps(source);
}

inline void store(float* target, Wide value) {
    _mm512_storeu_ps(target, value);
}

inline Wide splat_wide(float value) {
    return _mm512_set1_ps(value);
}

inline Wide add(Wide a, Wide b) {
    return _mm512_add_ps(a, b);
}

inline Wide subtract(Wide a, Wide b) {
    return _mm512_sub_ps(a, b);
}

inline Wide multiply(Wide a, Wide b) {
    return _mm512_mul_ps(a, b);
}

inline Wide divide(Wide a, Wide b) {
    return _mm512_div_ps(a, b);
}

inline Wide maximum(Wide a, Wide b) {
    return _mm512_max_ps(a, b);
}

inline Wide multiply_add(Wide a, Wide b, Wide c) {
    return _mm512_fmadd_ps(a, b, c);
}

// The same operations as exponential(Vector8), in the same order.
inline Wide exponential(Wide a) {
    const Wide low = _mm512_set1_ps(-87.33f);
    const Wide x = _mm512_min_ps(_mm512_set1_ps(88.37f), _mm512_max_ps(low, a));
    const Wide n = _mm512_roundscale_ps(multiply(x, _mm512_set1_ps(1.44269504f)), 8);  // nearest, no exception
    const Wide r =
        _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x));
    Wide p = _mm512_set1_ps(1.0f / 5040);
    for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = multiply_add(p, r, _mm512_set1_ps(c));
    const __m512i power = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
    const Wide scaled = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), power));
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, low, _CMP_NLT_UQ), scaled);
}

}  // namespace
}  // namespace ktqueue
