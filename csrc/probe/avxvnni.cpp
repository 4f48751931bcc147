#include <immintrin.h>

#include "isa/cpu_features.h"
#include "probe/loop.h"

namespace ktqueue {

namespace {

void int8_peak(size_t rounds) {
    const auto step = [](__m256i sum, __m256i a, __m256i b) { return _mm256_dpbusd_avx_epi32(sum, a, b); };
    multiply_loop(rounds, _mm256_set1_epi8(3), _mm256_set1_epi8(5), _mm256_setzero_si256(), step);
}

}  // namespace

const ProbeTable& avxvnni_probes() {
    static const ProbeTable table = {
        "avxvnni", has_avxvnni, nullptr, {{"vpdpbusd ymm", 2.0 * 32 * kAccumulators, int8_peak}, {}, {}}};
    return table;
}

}  // namespace ktqueue
