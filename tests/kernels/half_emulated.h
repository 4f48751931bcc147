// Arithmetic of 32 IEEE halves in a register, for kernels/bf16_weights.h, on CPUs without AVX512-FP16: rounded once, to nearest.
#pragma once

#include <immintrin.h>

namespace ktqueue {
namespace {

struct EmulatedHalf {
    static __m512i fused(__m512i a, __m512i b, __m512i c) {
        return each(a, b, c, [](__m512d x, __m512d y, __m512d z) { return _mm512_fmadd_pd(x, y, z); });
    }
    static __m512i times(__m512i a, __m512i b) {
        return each(a, b, a, [](__m512d x, __m512d y, __m512d) { return _mm512_mul_pd(x, y); });
    }
    static __m512i minus(__m512i a, __m512i b) {
        return each(a, b, a, [](__m512d x, __m512d y, __m512d) { return _mm512_sub_pd(x, y); });
    }

  private:
    // Doubles hold every result of halves that differ by less than 2^30. On their way back they pass through floats cut
    // towards zero, whose last bit says whether something was cut, so that nothing is rounded twice.
    template <class Operation>
    static __m512i each(__m512i a, __m512i b, __m512i c, Operation operation) {
        alignas(64) unsigned short halves[3][32];
        _mm512_store_si512(halves[0], a);
        _mm512_store_si512(halves[1], b);
        _mm512_store_si512(halves[2], c);
        for (int i = 0; i < 32; i += 8) {
            const auto wide = [&](int k) {
                return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<__m128i*>(halves[k] + i))));
            };
            const __m512d exact = operation(wide(0), wide(1), wide(2));
            const __m256 cut = _mm512_cvt_roundpd_ps(exact, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
            const __mmask8 inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(cut), exact, _CMP_NEQ_OQ);
            const __m256i bits = _mm256_castps_si256(cut);
            const __m256i odd = _mm256_mask_or_epi32(bits, inexact, bits, _mm256_set1_epi32(1));
            _mm_store_si128(reinterpret_cast<__m128i*>(halves[0] + i),
                            _mm256_cvtps_ph(_mm256_castsi256_ps(odd), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        }
        return _mm512_load_si512(halves[0]);
    }
};

}  // namespace
}  // namespace ktqueue
