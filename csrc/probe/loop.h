// The loops of the probes, for the vector type and instruction that a translation unit provides.
// Included only by such a translation unit; internal linkage, so that no code of one instruction set is used by
// another.
#pragma once

#include <utility>

#include "probe/table.h"

namespace ktqueue {
namespace {

// Makes the compiler believe that the value changes, in a vector register. So it cannot remove the instruction that
// computed the value, or compute it once for several accumulators. Generates no code.
template <class Vector>
inline void touch(Vector& value) {
#if defined(__AVX512F__)
    asm volatile("" : "+v"(value));
#elif defined(__x86_64__)
    asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(value));
#else
    asm volatile("" : "+m"(value));
#endif
}

// Two multiply-adds per cycle with a latency of five cycles need ten accumulators. Sixteen registers hold twelve beside
// the operands. They are variables because the compiler would keep an array in memory.
inline constexpr size_t kAccumulators = 12;

// In each round, calls step(accumulator, a, b) once for each accumulator.
template <class Vector, class Step>
inline void multiply_loop(size_t rounds, Vector a, Vector b, Vector zero, Step step) {
    Vector s0 = zero, s1 = zero, s2 = zero, s3 = zero, s4 = zero, s5 = zero;
    Vector s6 = zero, s7 = zero, s8 = zero, s9 = zero, s10 = zero, s11 = zero;
    const auto add = [&](Vector& sum) {
        touch(a);  // so that a product is not reused for the next sum
        sum = step(sum, a, b);
        touch(sum);
    };
    touch(b);
    for (size_t i = 0; i < rounds; ++i) {
        add(s0), add(s1), add(s2), add(s3), add(s4), add(s5);
        add(s6), add(s7), add(s8), add(s9), add(s10), add(s11);
    }
}

// Loads one vector at a time and combines it into one of eight sums: `load(pointer)`, `join(a, b)`.
inline constexpr size_t kReadSums = 8;

template <class Vector, class Load, class Join, size_t... I>
inline void read_step(Vector* sums, const char* data, Load load, Join join, std::index_sequence<I...>) {
    ((sums[I] = join(sums[I], load(data + I * sizeof(Vector)))), ...);
}

template <class Vector, class Load, class Join>
inline Vector read_loop(const char* data, size_t bytes, size_t prefetch, Vector zero, Load load, Join join) {
    constexpr size_t kStride = kReadSums * sizeof(Vector);
    static_assert(kReadStep % kStride == 0);
    Vector sums[kReadSums];
    for (Vector& sum : sums) sum = zero;
    for (const char* end = data + bytes; data < end; data += kStride) {
        if (prefetch != 0)
            for (size_t line = 0; line < kStride; line += 64) __builtin_prefetch(data + prefetch + line);
        read_step(sums, data, load, join, std::make_index_sequence<kReadSums>());
    }
    for (size_t i = 1; i < kReadSums; ++i) sums[0] = join(sums[0], sums[i]);
    return sums[0];
}

}  // namespace
}  // namespace ktqueue
