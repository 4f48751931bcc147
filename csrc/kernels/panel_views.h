// The packed formats whose codes are whole numbers, each as a view of one superblock: its lines, its scales, its weights
// as floats. kernels/float_views.h has the others. Included only by translation units of one instruction set, after a
// lanes header; internal linkage.
#pragma once

#include "formats/activations.h"
#include "kernels/float_views.h"

namespace ktqueue {
namespace {

// The values of nibbles, made unsigned by adding the format's offset.
struct CodeTable {
    alignas(16) uint8_t codes[16];
    constexpr CodeTable(const int8_t (&values)[16], int offset) : codes() {
        for (size_t i = 0; i < 16; ++i) codes[i] = static_cast<uint8_t>(values[i] + offset);
    }
};
constexpr CodeTable kIQ4Codes(kIQ4Values, activation_kind(Quant::IQ4_NL).offset);
constexpr CodeTable kMXFP4Codes(kMXFP4Values, activation_kind(Quant::MXFP4).offset);
constexpr CodeTable kIQ3XXSCodes(kIQ3XXSValues, activation_kind(Quant::IQ3_XXS).offset);
constexpr CodeTable kIQ3SCodes(kIQ3SValues, activation_kind(Quant::IQ3_S).offset);
constexpr CodeTable kIQ2Codes(kIQ2Values, activation_kind(Quant::IQ2_S).offset);

// The values of a format's codes; null where codes are whole numbers.
template <Quant Format>
constexpr const CodeTable* code_table() {
    switch (Format) {
        case Quant::IQ4_NL:
        case Quant::IQ4_XS:
            return &kIQ4Codes;
        case Quant::MXFP4:
        case Quant::NVFP4:
            return &kMXFP4Codes;
        case Quant::IQ3_XXS:
            return &kIQ3XXSCodes;
        case Quant::IQ3_S:
            return &kIQ3SCodes;
        default:
            return nullptr;
    }
}

// Adds `Value` to the codes of lines 2j and 2j + 1 of a slab whose bit in a plane of bits is set.
template <int Value>
inline void add_plane(const uint8_t* plane, size_t slab, size_t j, Bytes& even, Bytes& odd) {
    even = add_bits<Value>(even, plane + slab * 64 + j * 16);
    odd = add_bits<Value>(odd, plane + slab * 64 + j * 16 + 8);
}

// The plane of four bits that most formats have, and behind it that of the fifth ones.
template <Quant Format>
struct Nibbles {
    static constexpr bool kFive = Format == Quant::Q5_K || Format == Quant::Q5_1;
    const uint8_t *block, *bits, *end;

    Nibbles(const uint8_t* block, size_t slabs)
        : block(block), bits(block + 256 * slabs), end(block + (kFive ? 320 : 256) * slabs) {}

    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        const Bytes both = load_bytes(block + slab * 256 + j * 64);
        even = low_nibbles(both);
        odd = high_nibbles(both);
        if constexpr (kFive) add_plane<16>(bits, slab, j, even, odd);
        if constexpr (constexpr const CodeTable* kTable = code_table<Format>(); kTable != nullptr) {
            even = lookup(kTable->codes, even);
            odd = lookup(kTable->codes, odd);
        }
    }
};

// Reads lines 2j and 2j + 1 of a slab from a plane of bit pairs.
inline void pair_codes(const uint8_t* plane, size_t slab, size_t j, Bytes& even, Bytes& odd) {
    const Bytes four = load_bytes(plane + slab * 128 + j / 2 * 64);
    even = j % 2 == 0 ? bit_pairs<0>(four) : bit_pairs<4>(four);
    odd = j % 2 == 0 ? bit_pairs<2>(four) : bit_pairs<6>(four);
}

// The part that block formats share: floats() from codes and scales, with the operations of GGUF's own dequantisation.
template <class Format>
struct Scaled {
    static constexpr bool kMinimums = false;

    void floats(size_t slab, size_t j, Floats (&weights)[8]) const {
        const auto& format = static_cast<const Format&>(*this);
        constexpr ActivationKind kKind = activation_kind(Format::kQuant);
        const size_t half = kKind.halves ? j / 2 : 0;
        const Floats scale = format.scale(slab, half);
        Bytes lines[2];
        format.lines(slab, j, lines[0], lines[1]);
        for (int i = 0; i < 8; ++i) {
            const Floats code = column(lines[i / 4], i % 4);
            if constexpr (Format::kMinimums) {
                weights[i] = minus(times(scale, code), format.minimum(slab, half));
            } else {
                weights[i] = times(scale, minus(code, splat_float(static_cast<float>(kKind.offset))));
            }
        }
    }
};

// Scales and minimums of a superblock of Q4_K as 16-bit integers, so that one multiplication applies both.
//
// A slab's weights are d * s * c - dmin * n. With P = (c - 8) . q and Q = -8 * sum(q), its sum is
//     d * s * P + (dmin * n - d * s * 8) / 8 * Q
// Neither P nor Q exceeds 8 * 127 * 32 < 2^15. Products that start at Q * (2^16 + 1) end as Q * 2^16 + P: Q and P side
// by side. (Q is one less if P is negative, an eighth of the rounding error of an activation.) d * s and the other
// factor are rounded to integers. s and n are below 64, so with the unit (d + dmin / 8) / 512 both integers stay below
// 2^15 and the sum of the two products below 2^31. Rounding costs at most half of that unit.
struct WordFactors {
    Floats unit, scale, minimum;

    WordFactors() = default;
    WordFactors(Floats d, Floats dmin) {
        const Floats eighth = times(dmin, splat_float(0.125f));
        // Never 0, because it is a divisor, and too small to change any other value.
        const Floats largest = plus(plus(magnitude(d), magnitude(eighth)), splat_float(0x1p-60f));
        unit = times(largest, splat_float(0x1p-9f));
        scale = quotient(d, unit);
        minimum = quotient(eighth, unit);
    }

    // The factor of P in the lower words, of Q in the upper ones.
    Ints of_slab(Floats s, Floats n) const {
        const Floats scaled = times(s, scale);
        return join_words(round_to_ints(scaled), round_to_ints(minus(times(n, minimum), scaled)));
    }
};

template <>
struct Panel<Quant::Q8_0> : Scaled<Panel<Quant::Q8_0>> {
    static constexpr Quant kQuant = Quant::Q8_0;
    const uint8_t *block, *scales;
    Panel(const uint8_t* block, size_t slabs) : block(block), scales(block + 512 * slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        even = load_bytes(block + slab * 512 + j * 128);
        odd = load_bytes(block + slab * 512 + j * 128 + 64);
    }
    Floats scale(size_t slab, size_t) const { return load_halves(scales + 32 * slab); }
};

// Nibbles with a half, or an exponent, for each slab.
template <Quant Format>
    requires(Format == Quant::Q4_0 || Format == Quant::IQ4_NL || Format == Quant::MXFP4)
struct Panel<Format> : Scaled<Panel<Format>> {
    static constexpr Quant kQuant = Format;
    Nibbles<Format> nibbles;
    Panel(const uint8_t* block, size_t slabs) : nibbles(block, slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.lines(slab, j, even, odd); }
    Floats scale(size_t slab, size_t) const {
        if constexpr (Format == Quant::MXFP4) return load_exponents(nibbles.end + 16 * slab);
        return load_halves(nibbles.end + 32 * slab);
    }
};

// Nibbles with a byte for each slab, times d.
template <Quant Format>
    requires(Format == Quant::IQ4_XS || Format == Quant::IQ3_XXS || Format == Quant::IQ3_S)
struct Panel<Format> : Scaled<Panel<Format>> {
    static constexpr Quant kQuant = Format;
    Nibbles<Format> nibbles;
    Floats d;
    Panel(const uint8_t* block, size_t slabs) : nibbles(block, slabs), d(load_halves(nibbles.end + 16 * slabs)) {
        if constexpr (Format == Quant::IQ3_XXS) d = times(d, splat_float(0.5f));
    }
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.lines(slab, j, even, odd); }
    Floats scale(size_t slab, size_t) const {
        const uint8_t* scales = nibbles.end + 16 * slab;
        return times(d, Format == Quant::IQ4_XS ? load_signed(scales) : load_unsigned(scales));
    }
};

template <>
struct Panel<Quant::NVFP4> : Scaled<Panel<Quant::NVFP4>> {
    static constexpr Quant kQuant = Quant::NVFP4;
    Nibbles<Quant::NVFP4> nibbles;
    const uint8_t* scales;
    Floats d, r;  // for scales that are 2^-8 of what they stand for, and values that are twice it
    Panel(const uint8_t* block, size_t slabs)
        : nibbles(block, slabs),
          scales(nibbles.end),
          d(times(load_floats(factors(slabs)), splat_float(0x1p7f))),
          r(times(load_floats(factors(slabs) + kPanelRows), splat_float(0x1p7f))) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.lines(slab, j, even, odd); }
    Floats scale(size_t slab, size_t half) const {
        const Floats s = load_e4m3_halves(scales + 32 * slab + 16 * half);
        return fused(s, d, times(s, r));
    }

  private:
    const float* factors(size_t slabs) const { return reinterpret_cast<const float*>(scales + 32 * slabs); }
};

template <Quant Format>
    requires(Format == Quant::Q4_K || Format == Quant::Q5_K)
struct Panel<Format> : Scaled<Panel<Format>> {
    static constexpr Quant kQuant = Format;
    static constexpr bool kMinimums = true;
    Nibbles<Format> nibbles;
    const uint8_t *scales, *minimums;
    Floats d, dmin;
    Panel(const uint8_t* block, size_t slabs)
        : nibbles(block, slabs),
          scales(nibbles.end),
          minimums(scales + 16 * slabs),
          d(load_halves(minimums + 16 * slabs)),
          dmin(load_halves(minimums + 16 * slabs + 32)) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.lines(slab, j, even, odd); }
    Floats scale(size_t slab, size_t) const { return times(d, load_unsigned(scales + 16 * slab)); }
    Floats minimum(size_t slab, size_t) const { return times(dmin, load_unsigned(minimums + 16 * slab)); }
    WordFactors word_factors() const { return {d, dmin}; }
    Ints factors(const WordFactors& of, size_t slab) const {
        return of.of_slab(load_unsigned(scales + 16 * slab), load_unsigned(minimums + 16 * slab));
    }
};

template <>
struct Panel<Quant::Q6_K> : Scaled<Panel<Quant::Q6_K>> {
    static constexpr Quant kQuant = Quant::Q6_K;
    const uint8_t *nibbles, *pairs, *scales;
    Floats d;
    Panel(const uint8_t* block, size_t slabs)
        : nibbles(block),
          pairs(block + 256 * slabs),
          scales(pairs + 128 * slabs),
          d(load_halves(scales + 32 * slabs)) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        const Bytes both = load_bytes(nibbles + slab * 256 + j * 64);
        const Bytes four = load_bytes(pairs + slab * 128 + j / 2 * 64);
        even = join_planes(both, j % 2 == 0 ? shift_left<4>(four) : four);
        odd = join_planes(shift_right<4>(both), j % 2 == 0 ? shift_left<2>(four) : shift_right<2>(four));
    }
    Floats scale(size_t slab, size_t half) const { return times(d, load_signed(scales + 32 * slab + 16 * half)); }
};

template <>
struct Panel<Quant::Q3_K> : Scaled<Panel<Quant::Q3_K>> {
    static constexpr Quant kQuant = Quant::Q3_K;
    const uint8_t *pairs, *bits, *scales;
    Floats d;
    Panel(const uint8_t* block, size_t slabs)
        : pairs(block), bits(block + 128 * slabs), scales(bits + 64 * slabs), d(load_halves(scales + 32 * slabs)) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        pair_codes(pairs, slab, j, even, odd);
        add_plane<4>(bits, slab, j, even, odd);
    }
    Floats scale(size_t slab, size_t half) const { return times(d, load_signed(scales + 32 * slab + 16 * half)); }
};

template <>
struct Panel<Quant::Q2_K> : Scaled<Panel<Quant::Q2_K>> {
    static constexpr Quant kQuant = Quant::Q2_K;
    static constexpr bool kMinimums = true;
    const uint8_t *pairs, *scales;
    Floats d, dmin;
    Panel(const uint8_t* block, size_t slabs)
        : pairs(block),
          scales(block + 128 * slabs),
          d(load_halves(scales + 32 * slabs)),
          dmin(load_halves(scales + 32 * slabs + 32)) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { pair_codes(pairs, slab, j, even, odd); }
    Floats scale(size_t slab, size_t half) const { return times(d, load_low_nibbles(scales + 32 * slab + 16 * half)); }
    Floats minimum(size_t slab, size_t half) const {
        return times(dmin, load_high_nibbles(scales + 32 * slab + 16 * half));
    }
};

// The scales of IQ1 and IQ2: four bits for each half slab.
struct NibbleScales {
    const uint8_t* scales;
    Floats d;
    NibbleScales(const uint8_t* scales, size_t slabs)
        : scales(scales), d(times(load_halves(scales + 16 * slabs), splat_float(0.25f))) {}
    Floats scale(size_t slab, size_t half) const {
        const uint8_t* both = scales + 16 * slab;
        return times(d, plus(half == 0 ? load_low_nibbles(both) : load_high_nibbles(both), splat_float(0.5f)));
    }
};

template <>
struct Panel<Quant::IQ2_S> : Scaled<Panel<Quant::IQ2_S>> {
    static constexpr Quant kQuant = Quant::IQ2_S;
    const uint8_t *pairs, *bits;
    NibbleScales scales;
    Panel(const uint8_t* block, size_t slabs)
        : pairs(block), bits(block + 128 * slabs), scales(block + 192 * slabs, slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        pair_codes(pairs, slab, j, even, odd);
        add_plane<4>(bits, slab, j, even, odd);
        even = lookup(kIQ2Codes.codes, even);
        odd = lookup(kIQ2Codes.codes, odd);
    }
    Floats scale(size_t slab, size_t half) const { return scales.scale(slab, half); }
};

template <>
struct Panel<Quant::IQ1_M> : Scaled<Panel<Quant::IQ1_M>> {
    static constexpr Quant kQuant = Quant::IQ1_M;
    const uint8_t *pairs, *deltas;
    NibbleScales scales;
    Panel(const uint8_t* block, size_t slabs)
        : pairs(block), deltas(block + 128 * slabs), scales(block + 136 * slabs, slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        // Each pair comes to bits 3 and 4, which multiplies it by 8.
        const Bytes four = load_bytes(pairs + slab * 128 + j / 2 * 64);
        even = keep_bits<0x18>(j % 2 == 0 ? shift_left<3>(four) : shift_right<1>(four));
        odd = keep_bits<0x18>(j % 2 == 0 ? shift_left<1>(four) : shift_right<3>(four));
        const uint8_t* bits = deltas + slab * 8 + j * 2;
        even = add_row_bits<2>(even, bits);
        odd = add_row_bits<2>(odd, bits);
    }
    Floats scale(size_t slab, size_t half) const { return scales.scale(slab, half); }
};

template <Quant Format>
    requires(Format == Quant::Q4_1 || Format == Quant::Q5_1)
struct Panel<Format> : Scaled<Panel<Format>> {
    static constexpr Quant kQuant = Format;
    static constexpr bool kMinimums = true;
    Nibbles<Format> nibbles;
    const uint8_t* minimums;
    Panel(const uint8_t* block, size_t slabs) : nibbles(block, slabs), minimums(nibbles.end + 32 * slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.lines(slab, j, even, odd); }
    Floats scale(size_t slab, size_t) const { return load_halves(nibbles.end + 32 * slab); }
    Floats minimum(size_t slab, size_t) const { return minus(zero_floats(), load_halves(minimums + 32 * slab)); }
};

// Both d * c and d * z fit into a float, so their difference is d * (c - z).
template <>
struct Panel<Quant::UINT4> : Scaled<Panel<Quant::UINT4>> {
    static constexpr Quant kQuant = Quant::UINT4;
    static constexpr bool kMinimums = true;
    Nibbles<Quant::UINT4> nibbles;
    const uint8_t *scales, *zeros;
    Panel(const uint8_t* block, size_t slabs)
        : nibbles(block, slabs), scales(nibbles.end), zeros(scales + 32 * slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.lines(slab, j, even, odd); }
    Floats scale(size_t slab, size_t) const { return load_halves(scales + 32 * slab); }
    Floats minimum(size_t slab, size_t) const { return times(scale(slab, 0), load_unsigned(row_zeros(slab))); }
    const uint8_t* row_zeros(size_t slab) const { return zeros + 16 * slab; }
};

}  // namespace
}  // namespace ktqueue
