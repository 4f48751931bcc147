// Decoders in plain C++ of the formats that no instruction set has a decoder of its own for: Q2_K, Q3_K, IQ4_NL, IQ4_XS,
// MXFP4. Layouts: quant_format.h. Same face as quant_decode_portable.h.
// Included only by the quant_decode headers of one instruction set, after its vectors; internal linkage.
//
// Products are taken from left to right as in quant_format.h, so the values equal those of the `gguf` package bit for
// bit.
#pragma once

#include "quant_format.h"

namespace ktqueue {
namespace {

inline float half_to_float(const uint8_t* bytes);  // each instruction set has its own

// The vectors of a group's 32 values.
inline void pack(const float* values, Vector8* w) {
    for (int i = 0; i < 4; ++i) w[i] = load(values + 8 * i);
}

// step * table[nibble] for the 32 nibbles of 16 bytes, the low ones first.
inline void look_up(const uint8_t* q, const int8_t* table, float step, Vector8* w) {
    float values[32];
    for (int i = 0; i < 16; ++i) {
        values[i] = step * static_cast<float>(table[q[i] & 15]);
        values[i + 16] = step * static_cast<float>(table[q[i] >> 4]);
    }
    pack(values, w);
}

struct DecodeQ2_K {
    static constexpr size_t kBlock = 256, kBytes = 84;
    const uint8_t* block;
    float d, dmin;
    DecodeQ2_K() = default;
    explicit DecodeQ2_K(const uint8_t* data)
        : block(data), d(half_to_float(data + 80)), dmin(half_to_float(data + 82)) {}
    void decode(size_t g, Vector8* w) const {
        const uint8_t* q = block + 16 + g / 4 * 32;
        float values[32];
        for (int half = 0; half < 2; ++half) {
            const uint8_t s = block[2 * g + half];
            const float step = d * static_cast<float>(s & 15), offset = dmin * static_cast<float>(s >> 4);
            for (int i = 16 * half; i < 16 * half + 16; ++i)
                values[i] = step * static_cast<float>((q[i] >> (g % 4 * 2)) & 3) - offset;
        }
        pack(values, w);
    }
};

struct DecodeQ3_K {
    static constexpr size_t kBlock = 256, kBytes = 110;
    const uint8_t* block;
    float d;
    DecodeQ3_K() = default;
    explicit DecodeQ3_K(const uint8_t* data) : block(data), d(half_to_float(data + 108)) {}
    void decode(size_t g, Vector8* w) const {
        const uint8_t *h = block, *q = block + 32 + g / 4 * 32, *s = block + 96;
        float values[32];
        for (size_t half = 0; half < 2; ++half) {
            const size_t c = 2 * g + half;
            const int scale = ((s[c % 8] >> (c / 8 * 4)) & 15) | ((s[8 + c % 4] >> (c / 4 * 2)) & 3) << 4;
            const float step = d * static_cast<float>(scale - 32);
            for (size_t i = 16 * half; i < 16 * half + 16; ++i) {
                const int three = ((q[i] >> (g % 4 * 2)) & 3) | ((h[i] >> g) & 1) << 2;
                values[i] = step * static_cast<float>(three - 4);
            }
        }
        pack(values, w);
    }
};

struct DecodeIQ4_NL {
    static constexpr size_t kBlock = 32, kBytes = 18;
    const uint8_t* block;
    DecodeIQ4_NL() = default;
    explicit DecodeIQ4_NL(const uint8_t* data) : block(data) {}
    void decode(size_t, Vector8* w) const { look_up(block + 2, kIQ4Values, half_to_float(block), w); }
};

struct DecodeIQ4_XS {
    static constexpr size_t kBlock = 256, kBytes = 136;
    const uint8_t* block;
    float d;
    DecodeIQ4_XS() = default;
    explicit DecodeIQ4_XS(const uint8_t* data) : block(data), d(half_to_float(data)) {}
    void decode(size_t g, Vector8* w) const {
        const int top = block[2] | block[3] << 8;
        const int scale = ((block[4 + g / 2] >> (g % 2 * 4)) & 15) | ((top >> (2 * g)) & 3) << 4;
        look_up(block + 8 + 16 * g, kIQ4Values, d * static_cast<float>(scale - 32), w);
    }
};

struct DecodeMXFP4 {
    static constexpr size_t kBlock = 32, kBytes = 17;
    const uint8_t* block;
    DecodeMXFP4() = default;
    explicit DecodeMXFP4(const uint8_t* data) : block(data) {}
    void decode(size_t, Vector8* w) const {
        // 2^(e - 128) as bits; the two smallest are subnormal.
        const uint32_t e = block[0], bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
        float step;
        std::memcpy(&step, &bits, 4);
        look_up(block + 1, kMXFP4Values, step, w);
    }
};

}  // namespace
}  // namespace ktqueue
