// The eight tiles of AMX in plain C++, for kernels/bf16_tiles.h: configuration, loads, stores and the product as the
// operation sections of Intel's Software Developer's Manual, volume 2, spell them out. What would be an
// illegal-instruction fault there ends the program here.
#pragma once

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

// Subnormal numbers are zeros to the product, in operands and results.
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
            float sums[32] = {};  // even and odd k of each n apart, from zero
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

}  // namespace
}  // namespace ktqueue
