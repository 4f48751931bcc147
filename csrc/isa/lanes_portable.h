// Sixteen rows at once in plain C++: the vocabulary of kernels/panel_kernels.h, with the same bits as the vector
// versions. Included only by translation units of one instruction set; internal linkage.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "formats/half.h"

namespace ktqueue {
namespace {

struct Bytes {
    uint8_t lane[64];
};
struct Ints {
    int32_t lane[16];
};
struct Floats {
    float lane[16];
};
using Quad = const int8_t*;  // four activations, for every row

constexpr size_t kMaxTokens = 4;
constexpr size_t kPairTokens = 0, kMaxPairTokens = 0;  // two panels never share a pass
constexpr bool kSubtractsOffset = false;

template <class Result, class Operation>
inline Result make(Operation operation) {
    Result result;
    for (size_t i = 0; i < sizeof(result.lane) / sizeof(result.lane[0]); ++i) result.lane[i] = operation(i);
    return result;
}

inline Bytes load_bytes(const uint8_t* source) {
    Bytes result;
    std::memcpy(result.lane, source, 64);
    return result;
}

inline Bytes low_nibbles(const Bytes& codes) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>(codes.lane[i] & 15); });
}

inline Bytes high_nibbles(const Bytes& codes) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>(codes.lane[i] >> 4); });
}

template <int Shift>
inline Bytes bit_pairs(const Bytes& codes) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>(codes.lane[i] >> Shift & 3); });
}

// Shifts the bits of each byte.
template <int Shift>
inline Bytes shift_left(const Bytes& codes) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>(codes.lane[i] << Shift); });
}

template <int Shift>
inline Bytes shift_right(const Bytes& codes) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>(codes.lane[i] >> Shift); });
}

template <int Mask>
inline Bytes keep_bits(const Bytes& codes) {  // of each byte
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>(codes.lane[i] & Mask); });
}

// Bits 0 to 3 from `nibbles`, bits 4 and 5 from `pairs`.
inline Bytes join_planes(const Bytes& nibbles, const Bytes& pairs) {
    return make<Bytes>([&](size_t i) { return static_cast<uint8_t>((nibbles.lane[i] & 15) | (pairs.lane[i] & 0x30)); });
}

// Adds `Value` to each byte whose bit is set.
template <int Value>
inline Bytes add_bits(const Bytes& codes, const uint8_t* bits) {
    return make<Bytes>(
        [&](size_t i) { return static_cast<uint8_t>(codes.lane[i] + (bits[i / 8] >> i % 8 & 1 ? Value : 0)); });
}

// Adds `Value` to the four bytes of each row whose bit is set.
template <int Value>
inline Bytes add_row_bits(const Bytes& codes, const uint8_t* bits) {
    return make<Bytes>(
        [&](size_t i) { return static_cast<uint8_t>(codes.lane[i] + (bits[i / 32] >> i / 4 % 8 & 1 ? Value : 0)); });
}

inline Bytes lookup(const uint8_t* table, const Bytes& codes) {  // 16 entries
    return make<Bytes>([&](size_t i) { return table[codes.lane[i]]; });
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
        int32_t total = sum.lane[r];
        for (size_t i = 0; i < 4; ++i) total += codes.lane[4 * r + i] * four[i];
        return total;
    });
}

inline Ints dot_wide(const Ints& sum, const Bytes& codes, Quad four) {
    return dot(sum, codes, four);
}

inline Ints join_words(const Ints& low, const Ints& high) {  // low 16 bits of each; the upper bits are lost
    return make<Ints>([&](size_t r) {
        return static_cast<int32_t>((static_cast<uint32_t>(low.lane[r]) & 0xffffu) | static_cast<uint32_t>(high.lane[r])
                                                                                         << 16);
    });
}

inline Ints multiply_words(const Ints& a, const Ints& b) {  // per row, the sum of both products of signed 16-bit words
    return make<Ints>([&](size_t r) {
        return static_cast<int16_t>(a.lane[r]) * static_cast<int16_t>(b.lane[r]) +
               (a.lane[r] >> 16) * (b.lane[r] >> 16);
    });
}

inline Floats to_floats(const Ints& a) {
    return make<Floats>([&](size_t r) { return static_cast<float>(a.lane[r]); });
}

inline Floats column(const Bytes& codes, int i) {  // column i of the line, as floats
    return make<Floats>([&](size_t r) { return static_cast<float>(codes.lane[4 * r + static_cast<size_t>(i)]); });
}

inline Floats column_of_e4m3(const Bytes& codes, int i) {  // column i of a line of E4M3 numbers
    return make<Floats>([&](size_t r) { return e4m3_to_float(codes.lane[4 * r + static_cast<size_t>(i)]); });
}

inline Floats zero_floats() {
    return {};
}

inline Floats splat_float(float value) {
    return make<Floats>([&](size_t) { return value; });
}

inline Floats load_floats(const float* source) {
    Floats result;
    std::memcpy(result.lane, source, sizeof(result.lane));
    return result;
}

inline void store_floats(float* target, const Floats& a) {
    std::memcpy(target, a.lane, sizeof(a.lane));
}

inline Floats load_halves(const uint8_t* source) {
    return make<Floats>([&](size_t r) { return half_to_float(source + 2 * r); });
}

inline Floats load_e4m3_halves(const uint8_t* source) {  // E4M3 numbers without signs, times 2^-8
    return make<Floats>([&](size_t r) { return e4m3_to_float(source[r]) * 0x1p-8f; });
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

// Splits two adjacent columns of bf16 into the even and the odd one.
inline void load_bf16_pair(const uint8_t* source, Floats& even, Floats& odd) {
    for (size_t r = 0; r < 16; ++r) {
        uint32_t pair;
        std::memcpy(&pair, source + 4 * r, 4);
        const uint32_t low = pair << 16, high = pair & 0xffff0000u;
        std::memcpy(&even.lane[r], &low, 4);
        std::memcpy(&odd.lane[r], &high, 4);
    }
}

inline Floats times(const Floats& a, const Floats& b) {
    return make<Floats>([&](size_t r) { return a.lane[r] * b.lane[r]; });
}

inline Floats minus(const Floats& a, const Floats& b) {
    return make<Floats>([&](size_t r) { return a.lane[r] - b.lane[r]; });
}

inline Floats plus(const Floats& a, const Floats& b) {
    return make<Floats>([&](size_t r) { return a.lane[r] + b.lane[r]; });
}

inline Floats fused(const Floats& a, const Floats& b, const Floats& c) {  // a * b + c
    return make<Floats>([&](size_t r) { return std::fma(a.lane[r], b.lane[r], c.lane[r]); });
}

inline Floats fused_negative(const Floats& a, const Floats& b, const Floats& c) {  // c - a * b
    return make<Floats>([&](size_t r) { return std::fma(-a.lane[r], b.lane[r], c.lane[r]); });
}

inline Floats quotient(const Floats& a, const Floats& b) {
    return make<Floats>([&](size_t r) { return a.lane[r] / b.lane[r]; });
}

inline Floats magnitude(const Floats& a) {
    return make<Floats>([&](size_t r) { return std::fabs(a.lane[r]); });
}

inline Ints magnitude_bits(const Floats& a) {  // bits of |a|, which sort like the numbers, infinities and NaN last
    Ints result;
    std::memcpy(result.lane, a.lane, sizeof(a.lane));
    for (int32_t& bits : result.lane) bits &= 0x7fffffff;
    return result;
}

inline int32_t largest_int(const Ints& a, const Ints& b) {
    int32_t largest = a.lane[0];
    for (size_t r = 0; r < 16; ++r) {
        largest = a.lane[r] > largest ? a.lane[r] : largest;
        largest = b.lane[r] > largest ? b.lane[r] : largest;
    }
    return largest;
}

inline Ints round_to_ints(const Floats& a) {  // nearest, ties to even; a NaN becomes INT32_MIN
    return make<Ints>(
        [&](size_t r) { return std::isnan(a.lane[r]) ? INT32_MIN : static_cast<int32_t>(std::nearbyint(a.lane[r])); });
}

inline void store_low_bytes(int8_t* target, const Ints& a) {
    for (size_t r = 0; r < 16; ++r) target[r] = static_cast<int8_t>(a.lane[r]);
}

inline int32_t sum_ints(const Ints& a) {
    int32_t sum = 0;
    for (int32_t one : a.lane) sum += one;
    return sum;
}

}  // namespace
}  // namespace ktqueue
