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

}  // namespace
}  // namespace ktqueue
