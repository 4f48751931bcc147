// IEEE binary16 in plain C++. Internal linkage, so that translation units of different instruction sets share nothing.
#pragma once

#include <cstdint>
#include <cstring>

namespace ktqueue {
namespace {

inline float half_to_float(const uint8_t* bytes) {
    uint16_t half;
    std::memcpy(&half, bytes, 2);
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u, mantissa = half & 1023u;
    uint32_t bits;
    if (exponent == 31) {
        bits = 0x7f800000u | mantissa << 13;
    } else if (exponent != 0) {
        bits = (exponent + 112) << 23 | mantissa << 13;
    } else {  // subnormal: mantissa * 2^-24, which a float holds exactly
        const float value = static_cast<float>(mantissa) * 0x1p-24f;
        std::memcpy(&bits, &value, 4);
    }
    bits |= sign;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// The bits of the nearest half, ties to even. Numbers from 65520 on become infinite.
inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {  // subnormal: adding 1/2 rounds to multiples of 2^-24
        float rounded;
        std::memcpy(&rounded, &magnitude, 4);
        rounded += 0.5f;
        std::memcpy(&bits, &rounded, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
    }
    const uint32_t odd = magnitude >> 13 & 1u;
    return static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + odd) >> 13);
}

// An E4M3 number, with its bits as those of a float whose exponent is smaller by 120. NaN becomes 480.
inline float e4m3_to_float(uint8_t number) {
    const uint32_t bits = static_cast<uint32_t>(number & 0x80) << 24 | static_cast<uint32_t>(number & 0x7f) << 20;
    float small;
    std::memcpy(&small, &bits, 4);
    return small * 0x1p120f;
}

// The scale of NVFP4 that a byte stands for, an E4M3 number without a sign. As in the `gguf` package, 127 is 0, and 255
// is 480.
inline uint8_t scale_of_nvfp4(uint8_t number) {
    return number == 127 ? 0 : number & 127;
}

}  // namespace
}  // namespace ktqueue
