#include <immintrin.h>

#include "isa/cpu_features.h"
#include "probe/loop.h"

namespace ktqueue {

namespace {

// Three instructions for 32 multiply-adds: byte products summed in pairs to 16 bits, those in pairs to 32 bits, then
// added.
void int8_peak(size_t rounds) {
    const auto step = [](__m256i sum, __m256i a, __m256i b) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), b));
    };
    multiply_loop(rounds, _mm256_set1_epi8(3), _mm256_set1_epi8(5), _mm256_setzero_si256(), step);
}

void fp32_peak(size_t rounds) {
    const auto step = [](__m256 sum, __m256 a, __m256 b) { return _mm256_fmadd_ps(a, b, sum); };
    multiply_loop(rounds, _mm256_set1_ps(1), _mm256_set1_ps(0.5f), _mm256_setzero_ps(), step);
}

uint64_t read(const char* data, size_t bytes, size_t prefetch) {
    const auto load = [](const char* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); };
    const auto join = [](__m256i a, __m256i b) { return _mm256_xor_si256(a, b); };
    const __m256i sum = read_loop(data, bytes, prefetch, _mm256_setzero_si256(), load, join);
    const __m128i half = _mm_xor_si128(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    return static_cast<uint64_t>(_mm_extract_epi64(half, 0) ^ _mm_extract_epi64(half, 1));
}

}  // namespace

const ProbeTable& avx2_probes() {
    static const ProbeTable table = {
        "avx2",
        has_avx2,
        read,
        {{"vpmaddubsw+vpmaddwd ymm", 2.0 * 32 * kAccumulators, int8_peak},
         {},
         {"vfmadd231ps ymm", 2.0 * 8 * kAccumulators, fp32_peak}},
    };
    return table;
}

}  // namespace ktqueue
