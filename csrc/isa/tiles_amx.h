// The AMX tiles, and arithmetic on IEEE halves (AVX512-FP16) that unpacks weights for them: `Tiles` and `Half` of
// kernels/tile_kernels.h. The process must have asked for tiles first (isa/cpu_features.h). Instructions and
// configuration layout: Intel's Software Developer's Manual, volume 2. Written in assembly: some compilers lack the
// intrinsics for halves, and others have macros for tiles that take no template argument.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace ktqueue {
namespace {

struct AmxTiles {
    // Sets each tile to `rows` rows (1 to 16) of 64 bytes and to zero. Strides below are in bytes.
    static void configure(const uint8_t (&rows)[8]) {
        struct alignas(64) Config {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t tile_rows[16] = {};
        } config;
        static_assert(sizeof(Config) == 64);
        for (size_t i = 0; i < 8; ++i) {
            config.row_bytes[i] = 64;
            config.tile_rows[i] = rows[i];
        }
        asm volatile("ldtilecfg %0" : : "m"(config));
    }

    static void release() { asm volatile("tilerelease"); }

    template <int T>
    static void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(T));
    }

    template <int T>
    static void load(const void* source, size_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(source), "r"(stride), "i"(T) : "memory");
    }

    template <int T>
    static void store(void* target, size_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(target), "r"(stride), "i"(T) : "memory");
    }

    // C[m][n] += A[m][2k + i] * B[k][2n + i] in bf16, summed over k and i < 2.
    template <int C, int A, int B>
    static void dot_bf16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
    }
};

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
