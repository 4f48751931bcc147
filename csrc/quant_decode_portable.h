// Decoders of the weight formats in plain C++. Layouts: quant_format.h.
// Included only by translation units of one instruction set; everything has internal linkage.
//
// Each decoder has kBlock (weights), kBytes, a constructor that reads a block's header, and decode(group, w) which
// gives the 32 weights of a group as four vectors. Products round as in the `gguf` package, so the values are equal bit
// for bit.
#pragma once

#include "quant_format.h"
#include "vector_portable.h"
// Uses the vectors above.
#include "quant_decode_common.h"

namespace ktqueue {
namespace {

inline float half_to_float(const uint8_t* bytes) {
    uint16_t half;
    std::memcpy(&half, bytes, 2);
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u, mantissa = half & 1023u;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | mantissa << 13;  // infinity, NaN
    } else if (exponent != 0) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {  // zero, subnormal: mantissa * 2^-24
        const float value = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -value : value;
    }
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// The 6-bit scale and min of group g of a Q4_K or Q5_K block.
inline void unpack_scale_min(const uint8_t* s, size_t g, uint8_t& scale, uint8_t& min) {
    if (g < 4) {
        scale = s[g] & 63;
        min = s[g + 4] & 63;
    } else {
        scale = static_cast<uint8_t>((s[g + 4] & 15) | (s[g - 4] >> 6) << 4);
        min = static_cast<uint8_t>((s[g + 4] >> 4) | (s[g] >> 6) << 4);
    }
}

struct DecodeF32 {
    static constexpr size_t kBlock = 32, kBytes = 128;
    const uint8_t* data;
    DecodeF32() = default;
    explicit DecodeF32(const uint8_t* block) : data(block) {}
    void decode(size_t, Vector8* w) const { std::memcpy(w, data, kBytes); }
};

struct DecodeF16 {
    static constexpr size_t kBlock = 32, kBytes = 64;
    const uint8_t* data;
    DecodeF16() = default;
    explicit DecodeF16(const uint8_t* block) : data(block) {}
    void decode(size_t, Vector8* w) const {
        float values[32];
        for (size_t i = 0; i < 32; ++i) values[i] = half_to_float(data + 2 * i);
        pack(values, w);
    }
};

struct DecodeBF16 {
    static constexpr size_t kBlock = 32, kBytes = 64;
    const uint8_t* data;
    DecodeBF16() = default;
    explicit DecodeBF16(const uint8_t* block) : data(block) {}
    void decode(size_t, Vector8* w) const {
        uint32_t bits[32];
        for (size_t i = 0; i < 32; ++i) bits[i] = static_cast<uint32_t>(data[2 * i] | data[2 * i + 1] << 8) << 16;
        std::memcpy(w, bits, sizeof(bits));
    }
};

struct DecodeQ4_0 {
    static constexpr size_t kBlock = 32, kBytes = 18;
    const uint8_t* q;
    float d;
    DecodeQ4_0() = default;
    explicit DecodeQ4_0(const uint8_t* block) : q(block + 2), d(half_to_float(block)) {}
    void decode(size_t, Vector8* w) const {
        float values[32];
        for (int i = 0; i < 16; ++i) {
            values[i] = d * static_cast<float>((q[i] & 15) - 8);
            values[i + 16] = d * static_cast<float>((q[i] >> 4) - 8);
        }
        pack(values, w);
    }
};

struct DecodeQ8_0 {
    static constexpr size_t kBlock = 32, kBytes = 34;
    const uint8_t* q;
    float d;
    DecodeQ8_0() = default;
    explicit DecodeQ8_0(const uint8_t* block) : q(block + 2), d(half_to_float(block)) {}
    void decode(size_t, Vector8* w) const {
        float values[32];
        for (int i = 0; i < 32; ++i) values[i] = d * static_cast<float>(static_cast<int8_t>(q[i]));
        pack(values, w);
    }
};

struct DecodeQ4_K {
    static constexpr size_t kBlock = 256, kBytes = 144;
    const uint8_t* block;
    float d, dmin;
    DecodeQ4_K() = default;
    explicit DecodeQ4_K(const uint8_t* data) : block(data), d(half_to_float(data)), dmin(half_to_float(data + 2)) {}
    void decode(size_t g, Vector8* w) const {
        uint8_t scale, min;
        unpack_scale_min(block + 4, g, scale, min);
        const float step = d * scale, offset = dmin * min;
        const uint8_t* q = block + 16 + g / 2 * 32;
        float values[32];
        for (int i = 0; i < 32; ++i) values[i] = step * static_cast<float>((q[i] >> (g % 2 * 4)) & 15) - offset;
        pack(values, w);
    }
};

struct DecodeQ5_K {
    static constexpr size_t kBlock = 256, kBytes = 176;
    const uint8_t* block;
    float d, dmin;
    DecodeQ5_K() = default;
    explicit DecodeQ5_K(const uint8_t* data) : block(data), d(half_to_float(data)), dmin(half_to_float(data + 2)) {}
    void decode(size_t g, Vector8* w) const {
        uint8_t scale, min;
        unpack_scale_min(block + 4, g, scale, min);
        const float step = d * scale, offset = dmin * min;
        const uint8_t *h = block + 16, *q = block + 48 + g / 2 * 32;
        float values[32];
        for (int i = 0; i < 32; ++i) {
            const int five = ((q[i] >> (g % 2 * 4)) & 15) | ((h[i] >> g) & 1) << 4;
            values[i] = step * static_cast<float>(five) - offset;
        }
        pack(values, w);
    }
};

struct DecodeQ6_K {
    static constexpr size_t kBlock = 256, kBytes = 210;
    const uint8_t* block;
    float d;
    DecodeQ6_K() = default;
    explicit DecodeQ6_K(const uint8_t* data) : block(data), d(half_to_float(data + 208)) {}
    void decode(size_t g, Vector8* w) const {
        const size_t half = g / 4, quarter = g % 4;
        const uint8_t* l = block + 64 * half + 32 * (quarter & 1);
        const uint8_t* h = block + 128 + 32 * half;
        const uint8_t* scales = block + 192 + 2 * g;
        float values[32];
        for (int i = 0; i < 32; ++i) {
            const int six = ((l[i] >> (quarter / 2 * 4)) & 15) | ((h[i] >> (2 * quarter)) & 3) << 4;
            values[i] = d * static_cast<float>(static_cast<int8_t>(scales[i / 16])) * static_cast<float>(six - 32);
        }
        pack(values, w);
    }
};

}  // namespace
}  // namespace ktqueue
