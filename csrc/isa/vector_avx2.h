// Eight floats in one AVX2 register. Needs AVX2, FMA and F16C.
// Included only by translation units of one instruction set; everything has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ktqueue {
namespace {

using Vector8 = __m256;

inline Vector8 splat(float value) {
    return _mm256_set1_ps(value);
}

inline Vector8 zero() {
    return _mm256_setzero_ps();
}

inline Vector8 load(const float* source) {
    return _mm256_loadu_ps(source);
}

inline void store(float* target, Vector8 value) {
    _mm256_storeu_ps(target, value);
}

inline Vector8 add(Vector8 a, Vector8 b) {
    return _mm256_add_ps(a, b);
}

inline Vector8 subtract(Vector8 a, Vector8 b) {
    return _mm256_sub_ps(a, b);
}

inline Vector8 multiply(Vector8 a, Vector8 b) {
    return _mm256_mul_ps(a, b);
}

inline Vector8 divide(Vector8 a, Vector8 b) {
    return _mm256_div_ps(a, b);
}

inline Vector8 maximum(Vector8 a, Vector8 b) {
    return _mm256_max_ps(a, b);
}

// a * b + c, rounded once.
inline Vector8 multiply_add(Vector8 a, Vector8 b, Vector8 c) {
    return _mm256_fmadd_ps(a, b, c);
}

inline float sum(Vector8 a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float largest(Vector8 a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// exp(a), accurate to about one unit in the last place. With a = n ln 2 + r and |r| <= ln 2 / 2, exp(a) = 2^n exp(r),
// and exp(r) is its Taylor polynomial of degree 7 (error below 1e-8). ln 2 is split in two, so that n ln 2 is accurate
// enough.
// Above 88.37 the result stays at about 2.4e38 instead of infinity. Below -87.33 it is 0. NaN stays NaN.
inline Vector8 exponential(Vector8 a) {
    const Vector8 low = splat(-87.33f);
    // min and max return their second operand if one operand is NaN.
    const Vector8 x = _mm256_min_ps(splat(88.37f), _mm256_max_ps(low, a));
    const Vector8 n = _mm256_round_ps(multiply(x, splat(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vector8 r = _mm256_fnmadd_ps(n, splat(-2.12194440e-4f), _mm256_fnmadd_ps(n, splat(0.693359375f), x));
    Vector8 p = splat(1.0f / 5040);
    p = multiply_add(p, r, splat(1.0f / 720));
    p = multiply_add(p, r, splat(1.0f / 120));
    p = multiply_add(p, r, splat(1.0f / 24));
    p = multiply_add(p, r, splat(1.0f / 6));
    p = multiply_add(p, r, splat(0.5f));
    p = multiply_add(p, r, splat(1.0f));
    p = multiply_add(p, r, splat(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const Vector8 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
    return _mm256_and_ps(scaled, _mm256_cmp_ps(a, low, _CMP_NLT_UQ));
}

}  // namespace
}  // namespace ktqueue
