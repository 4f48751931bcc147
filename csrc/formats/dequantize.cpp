// Converts GGUF blocks to floats, in plain C++. Layouts: formats/quant_format.h.
//
// A decoder has kBlock (weights), kBytes, a constructor that reads a block's header, and decode(group, values), which
// writes the 32 weights of a group. Products are computed from left to right as in formats/quant_format.h, so the
// values equal those of the `gguf` package bit for bit.
#include <cmath>
#include <cstring>

#include "formats/grid_block.h"
#include "formats/half.h"
#include "formats/quant_format.h"

namespace ktqueue {

namespace {

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

// step * table[nibble] for the 32 nibbles of 16 bytes, the low ones first.
inline void look_up(const uint8_t* q, const int8_t* table, float step, float* values) {
    for (int i = 0; i < 16; ++i) {
        values[i] = step * static_cast<float>(table[q[i] & 15]);
        values[i + 16] = step * static_cast<float>(table[q[i] >> 4]);
    }
}

struct DecodeF32 {
    static constexpr size_t kBlock = 32, kBytes = 128;
    const uint8_t* data;
    explicit DecodeF32(const uint8_t* block) : data(block) {}
    void decode(size_t, float* values) const { std::memcpy(values, data, kBytes); }
};

struct DecodeF16 {
    static constexpr size_t kBlock = 32, kBytes = 64;
    const uint8_t* data;
    explicit DecodeF16(const uint8_t* block) : data(block) {}
    void decode(size_t, float* values) const {
        for (size_t i = 0; i < 32; ++i) values[i] = half_to_float(data + 2 * i);
    }
};

struct DecodeBF16 {
    static constexpr size_t kBlock = 32, kBytes = 64;
    const uint8_t* data;
    explicit DecodeBF16(const uint8_t* block) : data(block) {}
    void decode(size_t, float* values) const {
        uint32_t bits[32];
        for (size_t i = 0; i < 32; ++i) bits[i] = static_cast<uint32_t>(data[2 * i] | data[2 * i + 1] << 8) << 16;
        std::memcpy(values, bits, sizeof(bits));
    }
};

struct DecodeQ4_0 {
    static constexpr size_t kBlock = 32, kBytes = 18;
    const uint8_t* q;
    float d;
    explicit DecodeQ4_0(const uint8_t* block) : q(block + 2), d(half_to_float(block)) {}
    void decode(size_t, float* values) const {
        for (int i = 0; i < 16; ++i) {
            values[i] = d * static_cast<float>((q[i] & 15) - 8);
            values[i + 16] = d * static_cast<float>((q[i] >> 4) - 8);
        }
    }
};

struct DecodeQ8_0 {
    static constexpr size_t kBlock = 32, kBytes = 34;
    const uint8_t* q;
    float d;
    explicit DecodeQ8_0(const uint8_t* block) : q(block + 2), d(half_to_float(block)) {}
    void decode(size_t, float* values) const {
        for (int i = 0; i < 32; ++i) values[i] = d * static_cast<float>(static_cast<int8_t>(q[i]));
    }
};

struct DecodeQ4_K {
    static constexpr size_t kBlock = 256, kBytes = 144;
    const uint8_t* block;
    float d, dmin;
    explicit DecodeQ4_K(const uint8_t* data) : block(data), d(half_to_float(data)), dmin(half_to_float(data + 2)) {}
    void decode(size_t g, float* values) const {
        uint8_t scale, min;
        unpack_scale_min(block + 4, g, scale, min);
        const float step = d * scale, offset = dmin * min;
        const uint8_t* q = block + 16 + g / 2 * 32;
        for (int i = 0; i < 32; ++i) values[i] = step * static_cast<float>((q[i] >> (g % 2 * 4)) & 15) - offset;
    }
};

struct DecodeQ5_K {
    static constexpr size_t kBlock = 256, kBytes = 176;
    const uint8_t* block;
    float d, dmin;
    explicit DecodeQ5_K(const uint8_t* data) : block(data), d(half_to_float(data)), dmin(half_to_float(data + 2)) {}
    void decode(size_t g, float* values) const {
        uint8_t scale, min;
        unpack_scale_min(block + 4, g, scale, min);
        const float step = d * scale, offset = dmin * min;
        const uint8_t *h = block + 16, *q = block + 48 + g / 2 * 32;
        for (int i = 0; i < 32; ++i) {
            const int five = ((q[i] >> (g % 2 * 4)) & 15) | ((h[i] >> g) & 1) << 4;
            values[i] = step * static_cast<float>(five) - offset;
        }
    }
};

struct DecodeQ6_K {
    static constexpr size_t kBlock = 256, kBytes = 210;
    const uint8_t* block;
    float d;
    explicit DecodeQ6_K(const uint8_t* data) : block(data), d(half_to_float(data + 208)) {}
    void decode(size_t g, float* values) const {
        const size_t half = g / 4, quarter = g % 4;
        const uint8_t* l = block + 64 * half + 32 * (quarter & 1);
        const uint8_t* h = block + 128 + 32 * half;
        const uint8_t* scales = block + 192 + 2 * g;
        for (int i = 0; i < 32; ++i) {
            const int six = ((l[i] >> (quarter / 2 * 4)) & 15) | ((h[i] >> (2 * quarter)) & 3) << 4;
            values[i] = d * static_cast<float>(static_cast<int8_t>(scales[i / 16])) * static_cast<float>(six - 32);
        }
    }
};

struct DecodeQ2_K {
    static constexpr size_t kBlock = 256, kBytes = 84;
    const uint8_t* block;
    float d, dmin;
    explicit DecodeQ2_K(const uint8_t* data)
        : block(data), d(half_to_float(data + 80)), dmin(half_to_float(data + 82)) {}
    void decode(size_t g, float* values) const {
        const uint8_t* q = block + 16 + g / 4 * 32;
        for (int half = 0; half < 2; ++half) {
            const uint8_t s = block[2 * g + half];
            const float step = d * static_cast<float>(s & 15), offset = dmin * static_cast<float>(s >> 4);
            for (int i = 16 * half; i < 16 * half + 16; ++i)
                values[i] = step * static_cast<float>((q[i] >> (g % 4 * 2)) & 3) - offset;
        }
    }
};

struct DecodeQ3_K {
    static constexpr size_t kBlock = 256, kBytes = 110;
    const uint8_t* block;
    float d;
    explicit DecodeQ3_K(const uint8_t* data) : block(data), d(half_to_float(data + 108)) {}
    void decode(size_t g, float* values) const {
        const uint8_t *h = block, *q = block + 32 + g / 4 * 32, *s = block + 96;
        for (size_t half = 0; half < 2; ++half) {
            const size_t c = 2 * g + half;
            const int scale = ((s[c % 8] >> (c / 8 * 4)) & 15) | ((s[8 + c % 4] >> (c / 4 * 2)) & 3) << 4;
            const float step = d * static_cast<float>(scale - 32);
            for (size_t i = 16 * half; i < 16 * half + 16; ++i) {
                const int three = ((q[i] >> (g % 4 * 2)) & 3) | ((h[i] >> g) & 1) << 2;
                values[i] = step * static_cast<float>(three - 4);
            }
        }
    }
};

struct DecodeIQ4_NL {
    static constexpr size_t kBlock = 32, kBytes = 18;
    const uint8_t* block;
    explicit DecodeIQ4_NL(const uint8_t* data) : block(data) {}
    void decode(size_t, float* values) const { look_up(block + 2, kIQ4Values, half_to_float(block), values); }
};

struct DecodeIQ4_XS {
    static constexpr size_t kBlock = 256, kBytes = 136;
    const uint8_t* block;
    float d;
    explicit DecodeIQ4_XS(const uint8_t* data) : block(data), d(half_to_float(data)) {}
    void decode(size_t g, float* values) const {
        const int top = block[2] | block[3] << 8;
        const int scale = ((block[4 + g / 2] >> (g % 2 * 4)) & 15) | ((top >> (2 * g)) & 3) << 4;
        look_up(block + 8 + 16 * g, kIQ4Values, d * static_cast<float>(scale - 32), values);
    }
};

struct DecodeMXFP4 {
    static constexpr size_t kBlock = 32, kBytes = 17;
    const uint8_t* block;
    explicit DecodeMXFP4(const uint8_t* data) : block(data) {}
    void decode(size_t, float* values) const {
        // 2^(e - 128) as bits; the two smallest are subnormal.
        const uint32_t e = block[0], bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
        float step;
        std::memcpy(&step, &bits, 4);
        look_up(block + 1, kMXFP4Values, step, values);
    }
};

// Two runs of 16 nibbles, the low ones of 8 bytes first, each with its step.
inline void look_up_halves(const uint8_t* q, const float (&steps)[2], float* values) {
    for (const float step : steps) {
        for (size_t i = 0; i < 8; ++i) {
            values[i] = step * static_cast<float>(kMXFP4Values[q[i] & 15]);
            values[i + 8] = step * static_cast<float>(kMXFP4Values[q[i] >> 4]);
        }
        q += 8;
        values += 16;
    }
}

struct DecodeNVFP4 {
    static constexpr size_t kBlock = 64, kBytes = 36;
    const uint8_t* block;
    explicit DecodeNVFP4(const uint8_t* data) : block(data) {}
    void decode(size_t g, float* values) const {
        const auto step = [&](size_t k) { return 0.5f * e4m3_to_float(scale_of_nvfp4(block[k])); };
        look_up_halves(block + 4 + 16 * g, {step(2 * g), step(2 * g + 1)}, values);
    }
};

struct DecodeFP4 {
    static constexpr size_t kBlock = 64, kBytes = 44;
    const uint8_t* block;
    float d, r;
    explicit DecodeFP4(const uint8_t* data) : block(data) {
        std::memcpy(&d, data, 4);
        std::memcpy(&r, data + 4, 4);
    }
    void decode(size_t g, float* values) const {
        const auto step = [&](size_t k) {
            const float scale = 0.5f * e4m3_to_float(block[8 + k] & 127);
            return std::fma(scale, d, scale * r);
        };
        look_up_halves(block + 12 + 16 * g, {step(2 * g), step(2 * g + 1)}, values);
    }
};

// Q4_1, and Q5_1 with the fifth bits after the minimum.
template <size_t Bytes>
struct DecodeWithMinimum {
    static constexpr size_t kBlock = 32, kBytes = Bytes;
    const uint8_t* block;
    float d, m;
    explicit DecodeWithMinimum(const uint8_t* data) : block(data), d(half_to_float(data)), m(half_to_float(data + 2)) {}
    void decode(size_t, float* values) const {
        const uint8_t* q = block + Bytes - 16;
        for (size_t i = 0; i < 32; ++i) {
            int code = i < 16 ? q[i] & 15 : q[i - 16] >> 4;
            if (Bytes == 24) code |= (block[4 + i / 8] >> i % 8 & 1) << 4;
            values[i] = d * static_cast<float>(code) + m;
        }
    }
};

struct DecodeUINT4 {
    static constexpr size_t kBlock = 32, kBytes = 19;
    const uint8_t* block;
    float d;
    explicit DecodeUINT4(const uint8_t* data) : block(data), d(half_to_float(data)) {}
    void decode(size_t, float* values) const {
        for (int i = 0; i < 16; ++i) {
            values[i] = d * static_cast<float>((block[3 + i] & 15) - block[2]);
            values[i + 16] = d * static_cast<float>((block[3 + i] >> 4) - block[2]);
        }
    }
};

struct DecodeFP8 {
    static constexpr size_t kBlock = 128, kBytes = 132;
    const uint8_t* block;
    float d;
    explicit DecodeFP8(const uint8_t* data) : block(data) { std::memcpy(&d, data, 4); }
    void decode(size_t g, float* values) const {
        for (size_t i = 0; i < 32; ++i) values[i] = d * e4m3_to_float(block[4 + 32 * g + i]);
    }
};

template <Quant Format, size_t Bytes>
struct DecodeGrid {
    static constexpr size_t kBlock = 256, kBytes = Bytes;
    GridBlock block;
    float step;
    explicit DecodeGrid(const uint8_t* data) {
        read_grid_block(Format, data, block);
        step = half_to_float(block.d) * grid_unit(Format);
    }
    void decode(size_t g, float* values) const {
        for (size_t i = 0; i < 32; ++i)
            values[i] = step * block.scales[2 * g + i / 16] * static_cast<float>(block.values[32 * g + i]);
    }
};

template <class Decoder>
void dequantize(const uint8_t* data, size_t count, float* target) {
    for (; count >= Decoder::kBlock; count -= Decoder::kBlock, data += Decoder::kBytes) {
        const Decoder decoder(data);
        for (size_t g = 0; g < Decoder::kBlock / kGroup; ++g, target += kGroup) decoder.decode(g, target);
    }
    if (count) {  // only float formats, whose weights are whole bytes
        uint8_t padded[Decoder::kBytes] = {};
        std::memcpy(padded, data, count * (Decoder::kBytes / Decoder::kBlock));
        float values[Decoder::kBlock];
        dequantize<Decoder>(padded, Decoder::kBlock, values);
        std::memcpy(target, values, count * sizeof(float));
    }
}

constexpr DequantizeKernel kKernels[kQuantCount] = {
    dequantize<DecodeF32>,
    dequantize<DecodeF16>,
    dequantize<DecodeBF16>,
    dequantize<DecodeQ4_0>,
    dequantize<DecodeQ8_0>,
    dequantize<DecodeQ2_K>,
    dequantize<DecodeQ3_K>,
    dequantize<DecodeQ4_K>,
    dequantize<DecodeQ5_K>,
    dequantize<DecodeQ6_K>,
    dequantize<DecodeIQ4_NL>,
    dequantize<DecodeIQ4_XS>,
    dequantize<DecodeMXFP4>,
    dequantize<DecodeGrid<Quant::IQ2_XXS, 66>>,
    dequantize<DecodeGrid<Quant::IQ2_XS, 74>>,
    dequantize<DecodeGrid<Quant::IQ2_S, 82>>,
    dequantize<DecodeGrid<Quant::IQ3_XXS, 98>>,
    dequantize<DecodeGrid<Quant::IQ3_S, 110>>,
    dequantize<DecodeGrid<Quant::IQ1_S, 50>>,
    dequantize<DecodeGrid<Quant::IQ1_M, 56>>,
    dequantize<DecodeNVFP4>,
    dequantize<DecodeWithMinimum<20>>,
    dequantize<DecodeWithMinimum<24>>,
    dequantize<DecodeUINT4>,
    dequantize<DecodeFP8>,
    dequantize<DecodeFP4>,
};

}  // namespace

DequantizeKernel dequantize_kernel(Quant quant) {
    return kKernels[static_cast<size_t>(quant)];
}

}  // namespace ktqueue
