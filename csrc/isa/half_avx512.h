// Arithmetic of 32 IEEE halves in a register, rounded to nearest: the `Half` of kernels/bf16_weights.h. Needs AVX512-FP16: see
// isa/cpu_features.h. Assembly rather than intrinsics, so that compilers that know the registers but not these instructions do.
#pragma once

#include <immintrin.h>

namespace ktqueue {
namespace {

struct FullHalf {
    static __m512i fused(__m512i a, __m512i b, __m512i c) {  // a * b + c, rounded once
        asm("vfmadd213ph %2, %1, %0" : "+v"(a) : "v"(b), "v"(c));
        return a;
    }
    static __m512i times(__m512i a, __m512i b) {
        asm("vmulph %2, %1, %0" : "=v"(a) : "v"(a), "v"(b));
        return a;
    }
    static __m512i minus(__m512i a, __m512i b) {
        asm("vsubph %2, %1, %0" : "=v"(a) : "v"(a), "v"(b));
        return a;
    }
};

}  // namespace
}  // namespace ktqueue
