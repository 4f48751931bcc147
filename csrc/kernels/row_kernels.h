// Converts rows for the panel kernels: to int8 with scales, or to bf16.
// Included only by translation units of one instruction set, after a lanes header; internal linkage.
#pragma once

#include <limits>

#include "formats/activations.h"

namespace ktqueue {
namespace {

constexpr float kSmallest = 1e-30f;  // smaller slabs become zero, since 127 / x would not be finite

inline void quantize_slab(const float* x, ActivationKind kind, ActivationSlab& out) {
    const Floats low = load_floats(x), high = load_floats(x + 16);
    const int32_t bits = largest_int(magnitude_bits(low), magnitude_bits(high));
    float largest;
    std::memcpy(&largest, &bits, 4);
    const bool finite = bits < 0x7f800000;
    const float inverse = finite && largest >= kSmallest ? 127.0f / largest : 0.0f;
    out.scale = finite ? (inverse == 0.0f ? 0.0f : largest / 127.0f) : std::numeric_limits<float>::quiet_NaN();
    out.padding = 0;
    int32_t sums[2] = {0, 0};
    if (inverse != 0.0f) {
        const Ints q[2] = {round_to_ints(times(low, splat_float(inverse))),
                           round_to_ints(times(high, splat_float(inverse)))};
        for (int half = 0; half < 2; ++half) {
            store_low_bytes(out.q + 16 * half, q[half]);
            sums[half] = sum_ints(q[half]);
        }
    } else {
        std::memset(out.q, 0, sizeof(out.q));
    }
    if (!kind.halves) sums[0] = sums[1] = sums[0] + sums[1];
    for (int half = 0; half < 2; ++half) {
        if (kind.offset != 0) {
            const int32_t correction = -kind.offset * sums[half];
            out.correction[half] = correction;
            // Adds one in half of the slabs, to balance the one that a negative sum of products borrows.
            if (kind.words) out.correction[half] += (correction + (sums[half] & 1)) * 0x10000;
        } else {
            out.total[half] = out.scale * static_cast<float>(sums[half]);
        }
    }
}

inline void quantize(const float* x, size_t columns, ActivationKind kind, ActivationSlab* out) {
    size_t s = 0;
    for (; (s + 1) * kSlab <= columns; ++s) quantize_slab(x + s * kSlab, kind, out[s]);
    if (s * kSlab < columns) {
        float padded[kSlab] = {};
        std::memcpy(padded, x + s * kSlab, (columns - s * kSlab) * sizeof(float));
        quantize_slab(padded, kind, out[s]);
    }
}

// Rounds to nearest, ties to even. NaN stays NaN.
inline void bf16_row(const float* x, size_t columns, uint16_t* out) {
    for (size_t i = 0; i < columns; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        out[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
    }
    const size_t end = round_up(columns, kSlab);
    std::memset(out + columns, 0, (end - columns) * sizeof(uint16_t));
}

}  // namespace
}  // namespace ktqueue
