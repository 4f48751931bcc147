// Sixteen rows at once, in one AVX-512 register: the vocabulary of kernels/panel_kernels.h. Needs AVX-512 F, BW, DQ, VL
// and VNNI. Included only by translation units of one instruction set; internal linkage.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ktqueue {
namespace {

using Bytes = __m512i;  // a line: 16 rows x 4 columns
using Ints = __m512i;   // 16 rows
using Floats = __m512;  // 16 rows
using Quad = __m512i;   // four activations, repeated for every row

constexpr size_t kMaxTokens = 8;          // tokens that share a pass over the weights
constexpr size_t kPairTokens = 4;         // from this many tokens, two panels share a pass
constexpr size_t kMaxPairTokens = 6;      // tokens in such a pass, at most
constexpr bool kSubtractsOffset = false;  // whether dot_wide() itself subtracts 128 from each code

inline Bytes load_bytes(const uint8_t* source) {
    return _mm512_loadu_si512(source);
}

inline void store_bytes(uint8_t* target, Bytes a) {
    _mm512_storeu_si512(target, a);
}

inline Bytes low_nibbles(Bytes codes) {
    return _mm512_and_si512(codes, _mm512_set1_epi8(15));
}

inline Bytes high_nibbles(Bytes codes) {
    return _mm512_and_si512(_mm512_srli_epi16(codes, 4), _mm512_set1_epi8(15));
}

template <int Shift>
inline Bytes bit_pairs(Bytes codes) {
    return _mm512_and_si512(_mm512_srli_epi16(codes, Shift), _mm512_set1_epi8(3));
}

// Shifts the bits of each byte. Bits that come in from the neighbour byte are undefined.
template <int Shift>
inline Bytes shift_left(Bytes codes) {
    return _mm512_slli_epi16(codes, Shift);
}

template <int Shift>
inline Bytes shift_right(Bytes codes) {
    return _mm512_srli_epi16(codes, Shift);
}

template <int Mask>
inline Bytes keep_bits(Bytes codes) {  // of each byte
    return _mm512_and_si512(codes, _mm512_set1_epi8(Mask));
}

// Bits 0 to 3 from `nibbles`, bits 4 and 5 from `pairs`.
inline Bytes join_planes(Bytes nibbles, Bytes pairs) {
    const Bytes upper = _mm512_and_si512(pairs, _mm512_set1_epi8(0x30));
    return _mm512_ternarylogic_epi32(nibbles, _mm512_set1_epi8(15), upper, 0xea);  // a & b | c
}

// Adds `Value` to each byte whose bit is set.
template <int Value>
inline Bytes add_bits(Bytes codes, const uint8_t* bits) {
    uint64_t mask;
    std::memcpy(&mask, bits, 8);
    return _mm512_mask_add_epi8(codes, mask, codes, _mm512_set1_epi8(Value));
}

// Adds `Value` to the four bytes of each row whose bit is set.
template <int Value>
inline Bytes add_row_bits(Bytes codes, const uint8_t* bits) {
    uint16_t mask;
    std::memcpy(&mask, bits, 2);
    return _mm512_mask_add_epi32(codes, mask, codes, _mm512_set1_epi8(Value));
}

inline Bytes lookup(const uint8_t* table, Bytes codes) {  // 16 entries
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), codes);
}

inline Ints zero_ints() {
    return _mm512_setzero_si512();
}

inline Ints splat_int(int32_t value) {
    return _mm512_set1_epi32(value);
}

inline Quad load_quad(const int8_t* four) {
    int32_t word;
    std::memcpy(&word, four, 4);
    return _mm512_set1_epi32(word);
}

// sum[r] += codes of row r times the four activations.
inline Ints dot(Ints sum, Bytes codes, Quad x) {
    return _mm512_dpbusd_epi32(sum, codes, x);
}

inline Ints dot_wide(Ints sum, Bytes codes, Quad x) {
    return dot(sum, codes, x);
}

inline Ints load_ints(const int32_t* source) {
    return _mm512_loadu_si512(source);
}

inline void store_ints(int32_t* target, Ints a) {
    _mm512_storeu_si512(target, a);
}

inline Ints join_words(Ints low, Ints high) {  // low 16 bits of each; the upper bits are lost
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16));
}

inline Ints multiply_words(Ints a, Ints b) {  // per row, the sum of both products of signed 16-bit words
    return _mm512_madd_epi16(a, b);
}

inline Floats to_floats(Ints a) {
    return _mm512_cvtepi32_ps(a);
}

inline Floats column(Bytes codes, int i) {  // column i of the line, as floats
    return _mm512_cvtepi32_ps(
        _mm512_and_si512(_mm512_srli_epi32(codes, static_cast<unsigned>(8 * i)), _mm512_set1_epi32(255)));
}

// Column i of a line of E4M3 numbers. Their bits are those of floats whose exponent is smaller by 120.
inline Floats column_of_e4m3(Bytes codes, int i) {
    const __m512i upper = _mm512_slli_epi32(codes, static_cast<unsigned>(24 - 8 * i));
    const __m512i bits =
        _mm512_and_si512(_mm512_srai_epi32(upper, 4), _mm512_set1_epi32(static_cast<int>(0x87f00000u)));
    return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
}

inline Floats zero_floats() {
    return _mm512_setzero_ps();
}

inline Floats splat_float(float value) {
    return _mm512_set1_ps(value);
}

inline Floats load_floats(const float* source) {
    return _mm512_loadu_ps(source);
}

inline void store_floats(float* target, Floats a) {
    _mm512_storeu_ps(target, a);
}

inline Floats load_halves(const uint8_t* source) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}

// Sixteen E4M3 numbers without signs, times 2^-8: their bits are those of halves.
inline Floats load_e4m3_halves(const uint8_t* source) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 7));
}

inline Floats load_unsigned(const uint8_t* source) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
}

inline Floats load_signed(const uint8_t* source) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
}

inline Floats load_low_nibbles(const uint8_t* source) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    return _mm512_cvtepi32_ps(_mm512_and_si512(wide, _mm512_set1_epi32(15)));
}

inline Floats load_high_nibbles(const uint8_t* source) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(wide, 4));
}

// 2^(e - 128). The exponent field of the float is e - 1, except for e < 2, where the float is subnormal.
inline Floats load_exponents(const uint8_t* source) {
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    const __mmask16 tiny = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, tiny, _mm512_set1_epi32(0x00200000), e));
}

// Splits two adjacent columns of bf16 into the even and the odd one.
inline void load_bf16_pair(const uint8_t* source, Floats& even, Floats& odd) {
    const __m512i pair = _mm512_loadu_si512(source);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline Floats times(Floats a, Floats b) {
    return _mm512_mul_ps(a, b);
}

inline Floats minus(Floats a, Floats b) {
    return _mm512_sub_ps(a, b);
}

inline Floats plus(Floats a, Floats b) {
    return _mm512_add_ps(a, b);
}

inline Floats fused(Floats a, Floats b, Floats c) {  // a * b + c
    return _mm512_fmadd_ps(a, b, c);
}

inline Floats fused_negative(Floats a, Floats b, Floats c) {  // c - a * b
    return _mm512_fnmadd_ps(a, b, c);
}

inline Floats quotient(Floats a, Floats b) {
    return _mm512_div_ps(a, b);
}

inline Floats magnitude(Floats a) {
    return _mm512_abs_ps(a);
}

inline Ints magnitude_bits(Floats a) {  // bits of |a|, which sort like the numbers, infinities and NaN last
    return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff));
}

inline int32_t largest_int(Ints a, Ints b) {
    return _mm512_reduce_max_epi32(_mm512_max_epi32(a, b));
}

inline Ints round_to_ints(Floats a) {  // nearest, ties to even
    return _mm512_cvtps_epi32(a);
}

inline void store_low_bytes(int8_t* target, Ints a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8(a));
}

inline int32_t sum_ints(Ints a) {
    return _mm512_reduce_add_epi32(a);
}

}  // namespace
}  // namespace ktqueue
