// Decoders of the weight formats in AVX2 registers. Layouts: quant_format.h. Same face as quant_decode_portable.h.
// Included only by translation units of one instruction set; everything has internal linkage.
//
// Where a product and a difference are fused the product is exact anyway (a half has 11 bits, scales 6 to 8, weights 4
// to 6: at most 24 together), so the values equal those of the `gguf` package bit for bit.
#pragma once

#include "quant_format.h"
#include "vector_avx2.h"
// Uses the vectors above.
#include "quant_decode_common.h"

namespace ktqueue {
namespace {

inline float half_to_float(const uint8_t* bytes) {
    uint16_t half;
    std::memcpy(&half, bytes, 2);
    return _cvtsh_ss(half);
}

inline __m128i load_8_bytes(const uint8_t* source) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
}

inline __m128i load_16_bytes(const uint8_t* source) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

inline __m256i load_32_bytes(const uint8_t* source) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}

// 32 signed bytes to floats.
inline void widen(__m256i bytes, Vector8* w) {
    const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
    w[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
    w[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(low, low)));
    w[2] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high));
    w[3] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(high, high)));
}

// The nibbles of 32 bytes: the low ones for even `g`, the high ones for odd.
inline __m256i nibbles(__m256i bytes, size_t g) {
    return _mm256_and_si256(g % 2 ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}

struct DecodeF32 {
    static constexpr size_t kBlock = 32, kBytes = 128;
    const uint8_t* data;
    DecodeF32() = default;
    explicit DecodeF32(const uint8_t* block) : data(block) {}
    void decode(size_t, Vector8* w) const {
        for (size_t i = 0; i < 4; ++i) w[i] = _mm256_castsi256_ps(load_32_bytes(data + 32 * i));
    }
};

struct DecodeF16 {
    static constexpr size_t kBlock = 32, kBytes = 64;
    const uint8_t* data;
    DecodeF16() = default;
    explicit DecodeF16(const uint8_t* block) : data(block) {}
    void decode(size_t, Vector8* w) const {
        for (size_t i = 0; i < 4; ++i) w[i] = _mm256_cvtph_ps(load_16_bytes(data + 16 * i));
    }
};

struct DecodeBF16 {
    static constexpr size_t kBlock = 32, kBytes = 64;
    const uint8_t* data;
    DecodeBF16() = default;
    explicit DecodeBF16(const uint8_t* block) : data(block) {}
    void decode(size_t, Vector8* w) const {
        for (size_t i = 0; i < 4; ++i) {
            const __m256i wide = _mm256_cvtepu16_epi32(load_16_bytes(data + 16 * i));
            w[i] = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
        }
    }
};

struct DecodeQ4_0 {
    static constexpr size_t kBlock = 32, kBytes = 18;
    const uint8_t* block;
    DecodeQ4_0() = default;
    explicit DecodeQ4_0(const uint8_t* data) : block(data) {}
    void decode(size_t, Vector8* w) const {
        const Vector8 d = splat(half_to_float(block));
        const __m128i q = load_16_bytes(block + 2);
        const __m256i both = _mm256_set_m128i(_mm_srli_epi16(q, 4), q);
        widen(_mm256_sub_epi8(_mm256_and_si256(both, _mm256_set1_epi8(15)), _mm256_set1_epi8(8)), w);
        for (size_t i = 0; i < 4; ++i) w[i] = multiply(d, w[i]);
    }
};

struct DecodeQ8_0 {
    static constexpr size_t kBlock = 32, kBytes = 34;
    const uint8_t* block;
    DecodeQ8_0() = default;
    explicit DecodeQ8_0(const uint8_t* data) : block(data) {}
    void decode(size_t, Vector8* w) const {
        const Vector8 d = splat(half_to_float(block));
        for (size_t i = 0; i < 4; ++i) {
            const __m256i wide = _mm256_cvtepi8_epi32(load_8_bytes(block + 2 + 8 * i));
            w[i] = multiply(d, _mm256_cvtepi32_ps(wide));
        }
    }
};

// The eight d * scale and dmin * min of a Q4_K or Q5_K block.
struct StepsAndOffsets {
    float step[8], offset[8];
    StepsAndOffsets() = default;
    explicit StepsAndOffsets(const uint8_t* block) {
        uint32_t s[3];  // bytes 0..3, 4..7 and 8..11 of the packed scales
        std::memcpy(s, block + 4, sizeof(s));
        const uint64_t scales =
            (static_cast<uint64_t>((s[2] & 0x0f0f0f0fu) | (s[0] >> 2 & 0x30303030u)) << 32) | (s[0] & 0x3f3f3f3fu);
        const uint64_t mins =
            (static_cast<uint64_t>((s[2] >> 4 & 0x0f0f0f0fu) | (s[1] >> 2 & 0x30303030u)) << 32) | (s[1] & 0x3f3f3f3fu);
        const auto floats = [](uint64_t bytes) {
            return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))));
        };
        store(step, multiply(splat(half_to_float(block)), floats(scales)));
        store(offset, multiply(splat(half_to_float(block + 2)), floats(mins)));
    }
    void apply(size_t g, __m256i q, Vector8* w) const {
        widen(q, w);
        for (size_t i = 0; i < 4; ++i) w[i] = _mm256_fmsub_ps(splat(step[g]), w[i], splat(offset[g]));
    }
};

struct DecodeQ4_K {
    static constexpr size_t kBlock = 256, kBytes = 144;
    const uint8_t* block;
    StepsAndOffsets scales;
    DecodeQ4_K() = default;
    explicit DecodeQ4_K(const uint8_t* data) : block(data), scales(data) {}
    void decode(size_t g, Vector8* w) const { scales.apply(g, nibbles(load_32_bytes(block + 16 + g / 2 * 32), g), w); }
};

struct DecodeQ5_K {
    static constexpr size_t kBlock = 256, kBytes = 176;
    const uint8_t* block;
    StepsAndOffsets scales;
    DecodeQ5_K() = default;
    explicit DecodeQ5_K(const uint8_t* data) : block(data), scales(data) {}
    void decode(size_t g, Vector8* w) const {
        const __m256i bit = _mm256_set1_epi8(static_cast<char>(1 << g));
        const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(load_32_bytes(block + 16), bit), bit);
        const __m256i fifth = _mm256_and_si256(set, _mm256_set1_epi8(16));
        scales.apply(g, _mm256_or_si256(nibbles(load_32_bytes(block + 48 + g / 2 * 32), g), fifth), w);
    }
};

struct DecodeQ6_K {
    static constexpr size_t kBlock = 256, kBytes = 210;
    const uint8_t* block;
    float step[16];  // d * scale
    DecodeQ6_K() = default;
    explicit DecodeQ6_K(const uint8_t* data) : block(data) {
        const Vector8 d = splat(half_to_float(data + 208));
        for (size_t i = 0; i < 16; i += 8) {
            const __m256i scales = _mm256_cvtepi8_epi32(load_8_bytes(data + 192 + i));
            store(step + i, multiply(d, _mm256_cvtepi32_ps(scales)));
        }
    }
    void decode(size_t g, Vector8* w) const {
        const size_t half = g / 4, quarter = g % 4;
        const __m256i low = nibbles(load_32_bytes(block + 64 * half + 32 * (quarter & 1)), quarter / 2);
        const __m256i h = load_32_bytes(block + 128 + 32 * half);
        const __m256i two = _mm256_and_si256(_mm256_srli_epi16(h, static_cast<int>(2 * quarter)), _mm256_set1_epi8(3));
        const __m256i six = _mm256_or_si256(low, _mm256_slli_epi16(two, 4));
        widen(_mm256_sub_epi8(six, _mm256_set1_epi8(32)), w);
        for (size_t i = 0; i < 4; ++i) w[i] = multiply(splat(step[2 * g + i / 2]), w[i]);
    }
};

}  // namespace
}  // namespace ktqueue
