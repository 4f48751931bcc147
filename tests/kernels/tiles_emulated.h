// The eight AMX tiles in plain C++, for kernels/tile_kernels.h: configuration, loads, stores and the product, following
// the operation sections of Intel's Software Developer's Manual, volume 2. What would be an illegal-instruction fault
// on the CPU ends the program here.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ktqueue {
namespace {

struct EmulatedTile {
    size_t rows = 0;
    uint8_t bytes[16][64] = {};
};

inline thread_local EmulatedTile tiles[8];
inline thread_local bool tiles_configured = false;

inline void fault_unless(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "fault: %s\n", what);
    std::abort();
}

// The product treats subnormal operands and results as zero.
inline float flushed(float x) {
    return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}

inline float bf16_at(const uint8_t* bytes) {
    uint32_t bits = static_cast<uint32_t>(bytes[0] | bytes[1] << 8) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return flushed(value);
}

struct EmulatedTiles {
    static void configure(const uint8_t (&rows)[8]) {
        for (size_t i = 0; i < 8; ++i) {
            fault_unless(rows[i] >= 1 && rows[i] <= 16, "a tile has 1 to 16 rows");
            tiles[i] = {};
            tiles[i].rows = rows[i];
        }
        tiles_configured = true;
    }

    static void release() { tiles_configured = false; }

    static EmulatedTile& tile(int t) {
        fault_unless(tiles_configured, "tiles are not configured");
        return tiles[t];
    }

    template <int T>
    static void zero() {
        std::memset(tile(T).bytes, 0, sizeof(tile(T).bytes));
    }

    template <int T>
    static void load(const void* source, size_t stride) {
        zero<T>();
        for (size_t r = 0; r < tile(T).rows; ++r)
            std::memcpy(tile(T).bytes[r], static_cast<const uint8_t*>(source) + r * stride, 64);
    }

    template <int T>
    static void store(void* target, size_t stride) {
        for (size_t r = 0; r < tile(T).rows; ++r)
            std::memcpy(static_cast<uint8_t*>(target) + r * stride, tile(T).bytes[r], 64);
    }

    template <int C, int A, int B>
    static void dot_bf16() {
        static_assert(C != A && C != B && A != B);
        fault_unless(tile(C).rows == tile(A).rows && tile(B).rows == 16, "shapes of a product agree");
        float operands[16][32];
        for (size_t k = 0; k < 16; ++k)
            for (size_t n = 0; n < 32; ++n) operands[k][n] = bf16_at(tile(B).bytes[k] + 2 * n);
        for (size_t m = 0; m < tile(C).rows; ++m) {
            float sums[32] = {};  // even and odd k of each n are summed apart, from zero
            for (size_t k = 0; k < 16; ++k) {
                const float x[2] = {bf16_at(tile(A).bytes[m] + 4 * k), bf16_at(tile(A).bytes[m] + 4 * k + 2)};
                for (size_t n = 0; n < 32; ++n) sums[n] = flushed(std::fma(x[n % 2], operands[k][n], sums[n]));
            }
            float row[16];
            std::memcpy(row, tile(C).bytes[m], 64);
            for (size_t n = 0; n < 16; ++n) {
                const float both = flushed(sums[2 * n] + sums[2 * n + 1]);
                row[n] = flushed(flushed(row[n]) + both);
            }
            std::memcpy(tile(C).bytes[m], row, 64);
        }
    }
};

// Arithmetic of 32 IEEE halves in a register on CPUs without AVX512-FP16, for kernels/tile_operands.h: rounded once, to
// nearest.
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
    // Doubles hold every result of halves that differ by less than 2^30. The result is cut towards zero to a float
    // whose last bit records whether anything was cut, so that it is rounded only once.
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
