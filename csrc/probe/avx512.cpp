#include <immintrin.h>

#include "isa/cpu_features.h"
#include "probe/loop.h"

namespace ktqueue {

namespace {

void int8_peak(size_t rounds) {
    const auto step = [](__m512i sum, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sum, a, b); };
    multiply_loop(rounds, _mm512_set1_epi8(3), _mm512_set1_epi8(5), _mm512_setzero_si512(), step);
}

void bf16_peak(size_t rounds) {
    const auto step = [](__m512 sum, __m512 a, __m512 b) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    };
    const __m512 ones = _mm512_castsi512_ps(_mm512_set1_epi16(0x3f80));  // 1.0 in bfloat16, twice per lane
    multiply_loop(rounds, ones, ones, _mm512_setzero_ps(), step);
}

void fp32_peak(size_t rounds) {
    const auto step = [](__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); };
    multiply_loop(rounds, _mm512_set1_ps(1), _mm512_set1_ps(0.5f), _mm512_setzero_ps(), step);
}

uint64_t read(const char* data, size_t bytes, size_t prefetch) {
    const auto load = [](const char* from) { return _mm512_load_si512(from); };
    const auto join = [](__m512i a, __m512i b) { return _mm512_xor_si512(a, b); };
    const __m512i sum = read_loop(data, bytes, prefetch, _mm512_setzero_si512(), load, join);
    alignas(64) uint64_t parts[8];
    _mm512_store_si512(parts, sum);
    return parts[0] ^ parts[1] ^ parts[2] ^ parts[3] ^ parts[4] ^ parts[5] ^ parts[6] ^ parts[7];
}

}  // namespace

const ProbeTable& avx512_probes() {
    static const ProbeTable table = {
        "avx512",
        has_avx512,
        read,
        {{"vpdpbusd zmm", 2.0 * 64 * kAccumulators, int8_peak},
         {"vdpbf16ps zmm", 2.0 * 32 * kAccumulators, bf16_peak},
         {"vfmadd231ps zmm", 2.0 * 16 * kAccumulators, fp32_peak}},
    };
    return table;
}

}  // namespace ktqueue
