// Probes without a special instruction set: what any CPU of this architecture can do.
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "probe/loop.h"

namespace ktqueue {

namespace {

bool always() {
    return true;
}

// Sixteen bytes, the vector size that the compiler can use on any CPU of this architecture.
using Floats = float __attribute__((vector_size(16)));

void fp32_peak(size_t rounds) {
    const auto step = [](Floats sum, Floats a, Floats b) { return sum + a * b; };
    multiply_loop(rounds, Floats{1, 1, 1, 1}, Floats{2, 2, 2, 2}, Floats{}, step);
}

#if defined(__SSE2__)
constexpr const char* kInt8Instruction = "pmaddwd xmm";  // no byte products: bytes are widened first
constexpr double kInt8Products = 8;

void int8_peak(size_t rounds) {
    const auto step = [](__m128i sum, __m128i a, __m128i b) { return _mm_add_epi32(sum, _mm_madd_epi16(a, b)); };
    multiply_loop(rounds, _mm_set1_epi16(3), _mm_set1_epi16(5), _mm_setzero_si128(), step);
}
#else
constexpr const char* kInt8Instruction = "compiled int32";
constexpr double kInt8Products = 4;

void int8_peak(size_t rounds) {
    using Integers = int32_t __attribute__((vector_size(16)));
    const auto step = [](Integers sum, Integers a, Integers b) { return sum + a * b; };
    multiply_loop(rounds, Integers{3, 3, 3, 3}, Integers{5, 5, 5, 5}, Integers{}, step);
}
#endif

uint64_t read(const char* data, size_t bytes, size_t prefetch) {
    const auto load = [](const char* from) {
        uint64_t value;
        std::memcpy(&value, from, sizeof(value));
        return value;
    };
    return read_loop(data, bytes, prefetch, uint64_t{0}, load, [](uint64_t a, uint64_t b) { return a ^ b; });
}

}  // namespace

const ProbeTable& scalar_probes() {
    static const ProbeTable table = {
        "scalar",
        always,
        read,
        {{kInt8Instruction, 2.0 * kInt8Products * kAccumulators, int8_peak},
         {},
         {"compiled float32", 2.0 * 4 * kAccumulators, fp32_peak}},
    };
    return table;
}

}  // namespace ktqueue
