// Sixteen rows at once in plain C++: the vocabulary of kernels/panel_kernels.h, bit for bit as the vector ones.
// Included only by translation units of one instruction set; internal linkage.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "formats/half.h"

namespace ktqueue {
namespace {

struct Bytes {
    uint8_t at[64];
};
struct Ints {
    int32_t at[16];
};
struct Floats {
    float at[16];
};
using Quad = const int8_t*;  // four activations, for every row

constexpr size_t kMaxTokens = 4;
constexpr size_t kPairTokens = 0, kMaxPairTokens = 0;  // two panels never share a pass
constexpr bool kSubtractsOffset = false;

template <class Result, class Operation>
inline Result make(Operation operation) {
    Result result;
    for (size_t i = 0; i < sizeof(result.at) / sizeof(result.at[0]); ++i) result.at[i] = operation(i);
    return result;
}

inline Bytes load_bytes(const uint8_t* source) {
    Bytes result;
    std::memcpy(result.at, source, 64);
    return result;
}

inline Bytes low_nibbles(const Bytes& codes) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>(codes.at[i] & 15); });
}

inline Bytes high_nibbles(const Bytes& codes) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>(codes.at[i] >> 4); });
}

template <int Shift>
inline Bytes bit_pairs(const Bytes& codes) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>(codes.at[i] >> Shift & 3); });
}

// The bits of each byte, shifted; what comes in is any.
template <int Shift>
inline Bytes shift_left(const Bytes& codes) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>(codes.at[i] << Shift); });
}

template <int Shift>
inline Bytes shift_right(const Bytes& codes) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>(codes.at[i] >> Shift); });
}

// Bits 0 to 3 of the one, 4 and 5 of the other.
inline Bytes join_planes(const Bytes& nibbles, const Bytes& pairs) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>((nibbles.at[i] & 15) | (pairs.at[i] & 0x30)); });
}

// `value` added where the line's bit is set.
template <int Value>
inline Bytes add_bits(const Bytes& codes, const uint8_t* bits) {
    return make<Bytes>(
        [&](size_t i) { return static_cast<uint8_t>(codes.at[i] + (bits[i / 8] >> i % 8 & 1 ? Value : 0)); });
}

inline Bytes lookup(const uint8_t* table, const Bytes& codes) {  // 16 entries
    return make<Bytes>([&](size_t i) { return table[codes.at[i]]; });
}

inline Ints zero_ints() {
    return {};
}

inline Ints splat_int(int32_t value) {
    return make<Ints>([&](size_t) { return value; });
}

inline Quad load_quad(const int8_t* four) {
    return four;
}

// sum[r] += codes of row r times the four activations.
inline Ints dot(const Ints& sum, const Bytes& codes, Quad four) {
    return make<Ints>([&](size_t r) {
        int32_t total = sum.at[r];
        for (size_t i = 0; i < 4; ++i) total += codes.at[4 * r + i] * four[i];
        return total;
    });
}

inline Ints dot_wide(const Ints& sum, const Bytes& codes, Quad four) {
    return dot(sum, codes, four);
}

inline Ints join_words(const Ints& low, const Ints& high) {  // each 16 bits; the others are lost
    return make<Ints>([&](size_t r) {
        return static_cast<int32_t>((static_cast<uint32_t>(low.at[r]) & 0xffffu) | static_cast<uint32_t>(high.at[r])
                                                                                       << 16);
    });
}

inline Ints multiply_words(const Ints& a, const Ints& b) {  // the sums of the products of both signed words
    return make<Ints>([&](size_t r) {
        return static_cast<int16_t>(a.at[r]) * static_cast<int16_t>(b.at[r]) + (a.at[r] >> 16) * (b.at[r] >> 16);
    });
}

inline Floats to_floats(const Ints& a) {
    return make<Floats>([&](size_t r) { return static_cast<float>(a.at[r]); });
}

inline Floats column(const Bytes& codes, int i) {  // column i of the line as numbers
    return make<Floats>([&](size_t r) { return static_cast<float>(codes.at[4 * r + static_cast<size_t>(i)]); });
}

inline Floats zero_floats() {
    return {};
}

inline Floats splat_float(float value) {
    return make<Floats>([&](size_t) { return value; });
}

inline Floats load_floats(const float* source) {
    Floats result;
    std::memcpy(result.at, source, sizeof(result.at));
    return result;
}

inline void store_floats(float* target, const Floats& a) {
    std::memcpy(target, a.at, sizeof(a.at));
}

inline Floats load_halves(const uint8_t* source) {
    return make<Floats>([&](size_t r) { return half_to_float(source + 2 * r); });
}

inline Floats load_unsigned(const uint8_t* source) {
    return make<Floats>([&](size_t r) { return static_cast<float>(source[r]); });
}

inline Floats load_signed(const uint8_t* source) {
    return make<Floats>([&](size_t r) { return static_cast<float>(static_cast<int8_t>(source[r])); });
}

inline Floats load_low_nibbles(const uint8_t* source) {
    return make<Floats>([&](size_t r) { return static_cast<float>(source[r] & 15); });
}

inline Floats load_high_nibbles(const uint8_t* source) {
    return make<Floats>([&](size_t r) { return static_cast<float>(source[r] >> 4); });
}

inline Floats load_exponents(const uint8_t* source) {  // 2^(e - 128)
    return make<Floats>([&](size_t r) { return std::ldexp(1.0f, source[r] - 128); });
}

// Two columns of bf16 side by side: the even one, the odd one.
inline void load_bf16_pair(const uint8_t* source, Floats& even, Floats& odd) {
    for (size_t r = 0; r < 16; ++r) {
        uint32_t pair;
        std::memcpy(&pair, source + 4 * r, 4);
        const uint32_t low = pair << 16, high = pair & 0xffff0000u;
        std::memcpy(&even.at[r], &low, 4);
        std::memcpy(&odd.at[r], &high, 4);
    }
}

inline Floats times(const Floats& a, const Floats& b) {
    return make<Floats>([&](size_t r) { return a.at[r] * b.at[r]; });
}

inline Floats minus(const Floats& a, const Floats& b) {
    return make<Floats>([&](size_t r) { return a.at[r] - b.at[r]; });
}

inline Floats plus(const Floats& a, const Floats& b) {
    return make<Floats>([&](size_t r) { return a.at[r] + b.at[r]; });
}

inline Floats fused(const Floats& a, const Floats& b, const Floats& c) {  // a * b + c
    return make<Floats>([&](size_t r) { return std::fma(a.at[r], b.at[r], c.at[r]); });
}

inline Floats fused_negative(const Floats& a, const Floats& b, const Floats& c) {  // c - a * b
    return make<Floats>([&](size_t r) { return std::fma(-a.at[r], b.at[r], c.at[r]); });
}

inline Floats quotient(const Floats& a, const Floats& b) {
    return make<Floats>([&](size_t r) { return a.at[r] / b.at[r]; });
}

inline Floats magnitude(const Floats& a) {
    return make<Floats>([&](size_t r) { return std::fabs(a.at[r]); });
}

inline Ints magnitude_bits(const Floats& a) {  // of |a|; they order as numbers, infinities and NaN above all
    Ints result;
    std::memcpy(result.at, a.at, sizeof(a.at));
    for (int32_t& bits : result.at) bits &= 0x7fffffff;
    return result;
}

inline int32_t largest_int(const Ints& a, const Ints& b) {
    int32_t largest = a.at[0];
    for (size_t r = 0; r < 16; ++r) {
        largest = a.at[r] > largest ? a.at[r] : largest;
        largest = b.at[r] > largest ? b.at[r] : largest;
    }
    return largest;
}

inline Ints round_to_ints(const Floats& a) {  // nearest, ties to even; a NaN to the least of all
    return make<Ints>(
        [&](size_t r) { return std::isnan(a.at[r]) ? INT32_MIN : static_cast<int32_t>(std::nearbyint(a.at[r])); });
}

inline void store_low_bytes(int8_t* target, const Ints& a) {
    for (size_t r = 0; r < 16; ++r) target[r] = static_cast<int8_t>(a.at[r]);
}

inline int32_t sum_ints(const Ints& a) {
    int32_t sum = 0;
    for (int32_t one : a.at) sum += one;
    return sum;
}

}  // namespace
}  // namespace ktqueue
