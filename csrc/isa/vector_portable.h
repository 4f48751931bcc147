// Eight floats in plain C++: the portable twin of isa/vector_avx2.h, with the same lanes and the same order of sums.
// Included only by translation units of one instruction set; everything has internal linkage.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ktqueue {
namespace {

struct Vector8 {
    float lane[8];
};

inline Vector8 splat(float value) {
    Vector8 result;
    for (float& lane : result.lane) lane = value;
    return result;
}

inline Vector8 zero() {
    return splat(0.0f);
}

inline Vector8 load(const float* source) {
    Vector8 result;
    std::memcpy(result.lane, source, sizeof(result.lane));
    return result;
}

inline void store(float* target, Vector8 value) {
    std::memcpy(target, value.lane, sizeof(value.lane));
}

inline Vector8 add(Vector8 a, Vector8 b) {
    for (int i = 0; i < 8; ++i) a.lane[i] += b.lane[i];
    return a;
}

inline Vector8 subtract(Vector8 a, Vector8 b) {
    for (int i = 0; i < 8; ++i) a.lane[i] -= b.lane[i];
    return a;
}

inline Vector8 multiply(Vector8 a, Vector8 b) {
    for (int i = 0; i < 8; ++i) a.lane[i] *= b.lane[i];
    return a;
}

inline Vector8 divide(Vector8 a, Vector8 b) {
    for (int i = 0; i < 8; ++i) a.lane[i] /= b.lane[i];
    return a;
}

inline Vector8 maximum(Vector8 a, Vector8 b) {
    for (int i = 0; i < 8; ++i) a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}

// a * b + c; here with two roundings.
inline Vector8 multiply_add(Vector8 a, Vector8 b, Vector8 c) {
    for (int i = 0; i < 8; ++i) c.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
    return c;
}

inline float sum(Vector8 a) {
    for (int i = 0; i < 4; ++i) a.lane[i] += a.lane[i + 4];
    return (a.lane[0] + a.lane[2]) + (a.lane[1] + a.lane[3]);
}

inline float largest(Vector8 a) {
    float result = a.lane[0];
    for (int i = 1; i < 8; ++i) result = a.lane[i] > result ? a.lane[i] : result;
    return result;
}

inline Vector8 exponential(Vector8 a) {
    for (float& lane : a.lane) lane = std::exp(lane);
    return a;
}

}  // namespace
}  // namespace ktqueue
