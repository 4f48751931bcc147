// Sixteen rows at once, in two AVX2 registers each: the vocabulary of kernels/panel_kernels.h. Needs AVX2, FMA and
// F16C; with AVX-VNNI a product is one instruction. Included only by translation units of one instruction set; internal
// linkage.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ktqueue {
namespace {

// Rows 0..7 and rows 8..15.
struct Bytes {
    __m256i a, b;
};
struct Ints {
    __m256i a, b;
};
struct Floats {
    __m256 a, b;
};
using Quad = __m256i;  // four activations, repeated for every row

constexpr size_t kMaxTokens = 3;                       // tokens that share a pass over the weights
constexpr size_t kPairTokens = 0, kMaxPairTokens = 0;  // two panels never share a pass: too few registers
#if defined(__AVXVNNI__)
constexpr bool kSubtractsOffset = false;
#else
constexpr bool kSubtractsOffset = true;
#endif

inline __m256i load_half(const void* source) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(source));
}

inline __m128i load_quarter(const void* source) {
    return _mm_loadu_si128(static_cast<const __m128i*>(source));
}

template <class Operation>
inline Bytes each(Bytes x, Operation operation) {
    return {operation(x.a), operation(x.b)};
}

inline Bytes load_bytes(const uint8_t* source) {
    return {load_half(source), load_half(source + 32)};
}

inline Bytes low_nibbles(Bytes codes) {
    return each(codes, [](__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); });
}

inline Bytes high_nibbles(Bytes codes) {
    return each(codes, [](__m256i x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); });
}

template <int Shift>
inline Bytes bit_pairs(Bytes codes) {
    return each(codes, [](__m256i x) { return _mm256_and_si256(_mm256_srli_epi16(x, Shift), _mm256_set1_epi8(3)); });
}

// Shifts the bits of each byte. Bits that come in from the neighbour byte are undefined.
template <int Shift>
inline Bytes shift_left(Bytes codes) {
    return each(codes, [](__m256i x) { return _mm256_slli_epi16(x, Shift); });
}

template <int Shift>
inline Bytes shift_right(Bytes codes) {
    return each(codes, [](__m256i x) { return _mm256_srli_epi16(x, Shift); });
}

template <int Mask>
inline Bytes keep_bits(Bytes codes) {  // of each byte
    return each(codes, [](__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(Mask)); });
}

// Bits 0 to 3 from `nibbles`, bits 4 and 5 from `pairs`.
inline Bytes join_planes(Bytes nibbles, Bytes pairs) {
    const __m256i low = _mm256_set1_epi8(15), upper = _mm256_set1_epi8(0x30);
    return {_mm256_or_si256(_mm256_and_si256(nibbles.a, low), _mm256_and_si256(pairs.a, upper)),
            _mm256_or_si256(_mm256_and_si256(nibbles.b, low), _mm256_and_si256(pairs.b, upper))};
}

// Byte n is 0xff where bit n is set.
inline __m256i spread_bits(const uint8_t* bits) {
    int32_t word;
    std::memcpy(&word, bits, 4);
    const __m256i place = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(word), place);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}

// Adds `Value` to each byte whose bit is set.
template <int Value>
inline Bytes add_bits(Bytes codes, const uint8_t* bits) {
    const __m256i value = _mm256_set1_epi8(Value);
    return {_mm256_add_epi8(codes.a, _mm256_and_si256(spread_bits(bits), value)),
            _mm256_add_epi8(codes.b, _mm256_and_si256(spread_bits(bits + 4), value))};
}

// Adds `Value` to the four bytes of each row whose bit is set.
template <int Value>
inline Bytes add_row_bits(Bytes codes, const uint8_t* bits) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), value = _mm256_set1_epi8(Value);
    const auto add = [&](__m256i x, uint8_t eight) {
        const __m256i chosen = _mm256_and_si256(_mm256_set1_epi32(eight), bit);
        return _mm256_add_epi8(x, _mm256_and_si256(_mm256_cmpeq_epi32(chosen, bit), value));
    };
    return {add(codes.a, bits[0]), add(codes.b, bits[1])};
}

inline Bytes lookup(const uint8_t* table, Bytes codes) {  // 16 entries
    const __m256i entries = _mm256_broadcastsi128_si256(load_quarter(table));
    return each(codes, [&](__m256i x) { return _mm256_shuffle_epi8(entries, x); });
}

inline Ints zero_ints() {
    return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}

inline Ints splat_int(int32_t value) {
    return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)};
}

inline Quad load_quad(const int8_t* four) {
    int32_t word;
    std::memcpy(&word, four, 4);
    return _mm256_set1_epi32(word);
}

#if defined(__AVXVNNI__)

// sum[r] += codes of row r times the four activations.
inline Ints dot(Ints sum, Bytes codes, Quad x) {
    return {_mm256_dpbusd_avx_epi32(sum.a, codes.a, x), _mm256_dpbusd_avx_epi32(sum.b, codes.b, x)};
}

inline Ints dot_wide(Ints sum, Bytes codes, Quad x) {
    return dot(sum, codes, x);
}

#else

inline __m256i add_products(__m256i sum, __m256i codes, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(codes, x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// sum[r] += codes of row r times the four activations. Codes up to 128, else two products could exceed 16 bits.
inline Ints dot(Ints sum, Bytes codes, Quad x) {
    return {add_products(sum.a, codes.a, x), add_products(sum.b, codes.b, x)};
}

// The same for codes up to 255, after subtracting 128 from each: |c - 128| times the activation with the sign of c -
// 128.
inline Ints dot_wide(Ints sum, Bytes codes, Quad x) {
    const __m256i flip = _mm256_set1_epi8(-128);
    const __m256i a = _mm256_xor_si256(codes.a, flip), b = _mm256_xor_si256(codes.b, flip);
    return {add_products(sum.a, _mm256_abs_epi8(a), _mm256_sign_epi8(x, a)),
            add_products(sum.b, _mm256_abs_epi8(b), _mm256_sign_epi8(x, b))};
}

#endif

inline Ints join_words(Ints low, Ints high) {  // low 16 bits of each; the upper bits are lost
    return {_mm256_blend_epi16(low.a, _mm256_slli_epi32(high.a, 16), 0xaa),
            _mm256_blend_epi16(low.b, _mm256_slli_epi32(high.b, 16), 0xaa)};
}

inline Ints multiply_words(Ints x, Ints y) {  // per row, the sum of both products of signed 16-bit words
    return {_mm256_madd_epi16(x.a, y.a), _mm256_madd_epi16(x.b, y.b)};
}

inline Floats to_floats(Ints x) {
    return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}

inline Floats column(Bytes codes, int i) {  // column i of the line, as floats
    const auto convert = [i](__m256i x) {
        return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x, 8 * i), _mm256_set1_epi32(255)));
    };
    return {convert(codes.a), convert(codes.b)};
}

// Column i of a line of E4M3 numbers. Their bits are those of floats whose exponent is smaller by 120.
inline Floats column_of_e4m3(Bytes codes, int i) {
    const auto convert = [i](__m256i x) {
        const __m256i shifted = _mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * i), 4);
        const __m256i bits = _mm256_and_si256(shifted, _mm256_set1_epi32(static_cast<int>(0x87f00000u)));
        return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
    };
    return {convert(codes.a), convert(codes.b)};
}

inline Floats zero_floats() {
    return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}

inline Floats splat_float(float value) {
    return {_mm256_set1_ps(value), _mm256_set1_ps(value)};
}

inline Floats load_floats(const float* source) {
    return {_mm256_loadu_ps(source), _mm256_loadu_ps(source + 8)};
}

inline void store_floats(float* target, Floats x) {
    _mm256_storeu_ps(target, x.a);
    _mm256_storeu_ps(target + 8, x.b);
}

inline Floats load_halves(const uint8_t* source) {
    return {_mm256_cvtph_ps(load_quarter(source)), _mm256_cvtph_ps(load_quarter(source + 16))};
}

inline Ints widen(const uint8_t* source) {
    const __m128i x = load_quarter(source);
    return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}

// Sixteen E4M3 numbers without signs, times 2^-8: their bits are those of halves.
inline Floats load_e4m3_halves(const uint8_t* source) {
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_quarter(source)), 7);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}

inline Floats load_unsigned(const uint8_t* source) {
    return to_floats(widen(source));
}

inline Floats load_signed(const uint8_t* source) {
    const __m128i x = load_quarter(source);
    return to_floats(Ints{_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))});
}

inline Floats load_low_nibbles(const uint8_t* source) {
    const Ints x = widen(source);
    const __m256i mask = _mm256_set1_epi32(15);
    return to_floats(Ints{_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)});
}

inline Floats load_high_nibbles(const uint8_t* source) {
    const Ints x = widen(source);
    return to_floats(Ints{_mm256_srli_epi32(x.a, 4), _mm256_srli_epi32(x.b, 4)});
}

// 2^(e - 128). The exponent field of the float is e - 1, except for e < 2, where the float is subnormal.
inline Floats load_exponents(const uint8_t* source) {
    const auto convert = [](__m256i e) {
        const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
    };
    const Ints e = widen(source);
    return {convert(e.a), convert(e.b)};
}

// Splits two adjacent columns of bf16 into the even and the odd one.
inline void load_bf16_pair(const uint8_t* source, Floats& even, Floats& odd) {
    const __m256i a = load_half(source), b = load_half(source + 32);
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
}

inline Floats times(Floats x, Floats y) {
    return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}

inline Floats minus(Floats x, Floats y) {
    return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}

inline Floats plus(Floats x, Floats y) {
    return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}

inline Floats fused(Floats x, Floats y, Floats z) {  // x * y + z
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}

inline Floats fused_negative(Floats x, Floats y, Floats z) {  // z - x * y
    return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}

inline Floats quotient(Floats x, Floats y) {
    return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}

inline Floats magnitude(Floats x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}

inline Ints magnitude_bits(Floats x) {  // bits of |x|, which sort like the numbers, infinities and NaN last
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return {_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}

inline int32_t largest_int(Ints x, Ints y) {
    const __m256i eight = _mm256_max_epi32(_mm256_max_epi32(x.a, x.b), _mm256_max_epi32(y.a, y.b));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

inline Ints round_to_ints(Floats x) {  // nearest, ties to even
    return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}

inline void store_low_bytes(int8_t* target, Ints x) {  // values must fit in int8
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), bytes);
}

inline int32_t sum_ints(Ints x) {
    const __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

}  // namespace
}  // namespace ktqueue
