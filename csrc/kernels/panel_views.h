// The packed formats whose codes are whole numbers, each as a view of one superblock: its lines, its scales, its weights
// as floats. kernels/float_views.h has the others. Included only by translation units of one instruction set, after a
// lanes header; internal linkage.
#pragma once

#include "formats/activations.h"

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

// The plane of four bits that most formats have.
struct Nibbles {
    const uint8_t* block;

    void codes(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        const Bytes both = load_bytes(block + slab * 256 + j * 64);
        even = low_nibbles(both);
        odd = high_nibbles(both);
    }

    void values(size_t slab, size_t j, const CodeTable& table, Bytes& even, Bytes& odd) const {
        codes(slab, j, even, odd);
        even = lookup(table.codes, even);
        odd = lookup(table.codes, odd);
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

struct PanelQ8_0 : Scaled<PanelQ8_0> {
    static constexpr Quant kQuant = Quant::Q8_0;
    const uint8_t *block, *scales;
    PanelQ8_0(const uint8_t* block, size_t slabs) : block(block), scales(block + 512 * slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        even = load_bytes(block + slab * 512 + j * 128);
        odd = load_bytes(block + slab * 512 + j * 128 + 64);
    }
    Floats scale(size_t slab, size_t) const { return load_halves(scales + 32 * slab); }
};

struct PanelQ4_0 : Scaled<PanelQ4_0> {
    static constexpr Quant kQuant = Quant::Q4_0;
    Nibbles nibbles;
    const uint8_t* scales;
    PanelQ4_0(const uint8_t* block, size_t slabs) : nibbles{block}, scales(block + 256 * slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.codes(slab, j, even, odd); }
    Floats scale(size_t slab, size_t) const { return load_halves(scales + 32 * slab); }
};

struct PanelIQ4_NL : Scaled<PanelIQ4_NL> {
    static constexpr Quant kQuant = Quant::IQ4_NL;
    Nibbles nibbles;
    const uint8_t* scales;
    PanelIQ4_NL(const uint8_t* block, size_t slabs) : nibbles{block}, scales(block + 256 * slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.values(slab, j, kIQ4Codes, even, odd); }
    Floats scale(size_t slab, size_t) const { return load_halves(scales + 32 * slab); }
};

struct PanelMXFP4 : Scaled<PanelMXFP4> {
    static constexpr Quant kQuant = Quant::MXFP4;
    Nibbles nibbles;
    const uint8_t* exponents;
    PanelMXFP4(const uint8_t* block, size_t slabs) : nibbles{block}, exponents(block + 256 * slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        nibbles.values(slab, j, kMXFP4Codes, even, odd);
    }
    Floats scale(size_t slab, size_t) const { return load_exponents(exponents + 16 * slab); }
};

struct PanelIQ4_XS : Scaled<PanelIQ4_XS> {
    static constexpr Quant kQuant = Quant::IQ4_XS;
    Nibbles nibbles;
    const uint8_t* scales;
    Floats d;
    PanelIQ4_XS(const uint8_t* block, size_t slabs)
        : nibbles{block}, scales(block + 256 * slabs), d(load_halves(block + 272 * slabs)) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.values(slab, j, kIQ4Codes, even, odd); }
    Floats scale(size_t slab, size_t) const { return times(d, load_signed(scales + 16 * slab)); }
};

template <Quant Format>
struct PanelIQ3 : Scaled<PanelIQ3<Format>> {
    static constexpr Quant kQuant = Format;
    Nibbles nibbles;
    const uint8_t* scales;
    Floats d;
    PanelIQ3(const uint8_t* block, size_t slabs)
        : nibbles{block}, scales(block + 256 * slabs), d(load_halves(block + 272 * slabs)) {
        if constexpr (Format == Quant::IQ3_XXS) d = times(d, splat_float(0.5f));
    }
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        nibbles.values(slab, j, Format == Quant::IQ3_S ? kIQ3SCodes : kIQ3XXSCodes, even, odd);
    }
    Floats scale(size_t slab, size_t) const { return times(d, load_unsigned(scales + 16 * slab)); }
};

struct PanelNVFP4 : Scaled<PanelNVFP4> {
    static constexpr Quant kQuant = Quant::NVFP4;
    Nibbles nibbles;
    const uint8_t* scales;
    Floats d, r;  // for scales that are 2^-8 of what they stand for, and values that are twice it
    PanelNVFP4(const uint8_t* block, size_t slabs)
        : nibbles{block},
          scales(block + 256 * slabs),
          d(times(load_floats(factors(slabs)), splat_float(0x1p7f))),
          r(times(load_floats(factors(slabs) + kPanelRows), splat_float(0x1p7f))) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        nibbles.values(slab, j, kMXFP4Codes, even, odd);
    }
    Floats scale(size_t slab, size_t half) const {
        const Floats s = load_e4m3_halves(scales + 32 * slab + 16 * half);
        return fused(s, d, times(s, r));
    }

  private:
    const float* factors(size_t slabs) const { return reinterpret_cast<const float*>(scales + 32 * slabs); }
};

struct PanelQ4_K : Scaled<PanelQ4_K> {
    static constexpr Quant kQuant = Quant::Q4_K;
    static constexpr bool kMinimums = true;
    Nibbles nibbles;
    const uint8_t *scales, *minimums;
    Floats d, dmin;
    PanelQ4_K(const uint8_t* block, size_t slabs)
        : nibbles{block},
          scales(block + 256 * slabs),
          minimums(scales + 16 * slabs),
          d(load_halves(minimums + 16 * slabs)),
          dmin(load_halves(minimums + 16 * slabs + 32)) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.codes(slab, j, even, odd); }
    Floats scale(size_t slab, size_t) const { return times(d, load_unsigned(scales + 16 * slab)); }
    Floats minimum(size_t slab, size_t) const { return times(dmin, load_unsigned(minimums + 16 * slab)); }
    WordFactors word_factors() const { return {d, dmin}; }
    Ints factors(const WordFactors& of, size_t slab) const {
        return of.of_slab(load_unsigned(scales + 16 * slab), load_unsigned(minimums + 16 * slab));
    }
};

struct PanelQ5_K : Scaled<PanelQ5_K> {
    static constexpr Quant kQuant = Quant::Q5_K;
    static constexpr bool kMinimums = true;
    Nibbles nibbles;
    const uint8_t *bits, *scales, *minimums;
    Floats d, dmin;
    PanelQ5_K(const uint8_t* block, size_t slabs)
        : nibbles{block},
          bits(block + 256 * slabs),
          scales(bits + 64 * slabs),
          minimums(scales + 16 * slabs),
          d(load_halves(minimums + 16 * slabs)),
          dmin(load_halves(minimums + 16 * slabs + 32)) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        nibbles.codes(slab, j, even, odd);
        even = add_bits<16>(even, bits + slab * 64 + j * 16);
        odd = add_bits<16>(odd, bits + slab * 64 + j * 16 + 8);
    }
    Floats scale(size_t slab, size_t) const { return times(d, load_unsigned(scales + 16 * slab)); }
    Floats minimum(size_t slab, size_t) const { return times(dmin, load_unsigned(minimums + 16 * slab)); }
};

struct PanelQ6_K : Scaled<PanelQ6_K> {
    static constexpr Quant kQuant = Quant::Q6_K;
    Nibbles nibbles;
    const uint8_t *pairs, *scales;
    Floats d;
    PanelQ6_K(const uint8_t* block, size_t slabs)
        : nibbles{block},
          pairs(block + 256 * slabs),
          scales(pairs + 128 * slabs),
          d(load_halves(scales + 32 * slabs)) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        const Bytes both = load_bytes(nibbles.block + slab * 256 + j * 64);
        const Bytes four = load_bytes(pairs + slab * 128 + j / 2 * 64);
        even = join_planes(both, j % 2 == 0 ? shift_left<4>(four) : four);
        odd = join_planes(shift_right<4>(both), j % 2 == 0 ? shift_left<2>(four) : shift_right<2>(four));
    }
    Floats scale(size_t slab, size_t half) const { return times(d, load_signed(scales + 32 * slab + 16 * half)); }
};

struct PanelQ3_K : Scaled<PanelQ3_K> {
    static constexpr Quant kQuant = Quant::Q3_K;
    const uint8_t *pairs, *bits, *scales;
    Floats d;
    PanelQ3_K(const uint8_t* block, size_t slabs)
        : pairs(block), bits(block + 128 * slabs), scales(bits + 64 * slabs), d(load_halves(scales + 32 * slabs)) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        pair_codes(pairs, slab, j, even, odd);
        even = add_bits<4>(even, bits + slab * 64 + j * 16);
        odd = add_bits<4>(odd, bits + slab * 64 + j * 16 + 8);
    }
    Floats scale(size_t slab, size_t half) const { return times(d, load_signed(scales + 32 * slab + 16 * half)); }
};

struct PanelQ2_K : Scaled<PanelQ2_K> {
    static constexpr Quant kQuant = Quant::Q2_K;
    static constexpr bool kMinimums = true;
    const uint8_t *pairs, *scales;
    Floats d, dmin;
    PanelQ2_K(const uint8_t* block, size_t slabs)
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

struct PanelIQ2 : Scaled<PanelIQ2> {
    static constexpr Quant kQuant = Quant::IQ2_S;
    const uint8_t *pairs, *bits;
    NibbleScales scales;
    PanelIQ2(const uint8_t* block, size_t slabs)
        : pairs(block), bits(block + 128 * slabs), scales(block + 192 * slabs, slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        pair_codes(pairs, slab, j, even, odd);
        even = lookup(kIQ2Codes.codes, add_bits<4>(even, bits + slab * 64 + j * 16));
        odd = lookup(kIQ2Codes.codes, add_bits<4>(odd, bits + slab * 64 + j * 16 + 8));
    }
    Floats scale(size_t slab, size_t half) const { return scales.scale(slab, half); }
};

struct PanelIQ1 : Scaled<PanelIQ1> {
    static constexpr Quant kQuant = Quant::IQ1_M;
    const uint8_t *pairs, *deltas;
    NibbleScales scales;
    PanelIQ1(const uint8_t* block, size_t slabs)
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

struct PanelQ4_1 : Scaled<PanelQ4_1> {
    static constexpr Quant kQuant = Quant::Q4_1;
    static constexpr bool kMinimums = true;
    Nibbles nibbles;
    const uint8_t *scales, *minimums;
    PanelQ4_1(const uint8_t* block, size_t slabs)
        : nibbles{block}, scales(block + 256 * slabs), minimums(scales + 32 * slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.codes(slab, j, even, odd); }
    Floats scale(size_t slab, size_t) const { return load_halves(scales + 32 * slab); }
    Floats minimum(size_t slab, size_t) const { return minus(zero_floats(), load_halves(minimums + 32 * slab)); }
};

struct PanelQ5_1 : Scaled<PanelQ5_1> {
    static constexpr Quant kQuant = Quant::Q5_1;
    static constexpr bool kMinimums = true;
    Nibbles nibbles;
    const uint8_t *bits, *scales, *minimums;
    PanelQ5_1(const uint8_t* block, size_t slabs)
        : nibbles{block}, bits(block + 256 * slabs), scales(bits + 64 * slabs), minimums(scales + 32 * slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const {
        nibbles.codes(slab, j, even, odd);
        even = add_bits<16>(even, bits + slab * 64 + j * 16);
        odd = add_bits<16>(odd, bits + slab * 64 + j * 16 + 8);
    }
    Floats scale(size_t slab, size_t) const { return load_halves(scales + 32 * slab); }
    Floats minimum(size_t slab, size_t) const { return minus(zero_floats(), load_halves(minimums + 32 * slab)); }
};

// Both d * c and d * z fit into a float, so their difference is d * (c - z).
struct PanelUINT4 : Scaled<PanelUINT4> {
    static constexpr Quant kQuant = Quant::UINT4;
    static constexpr bool kMinimums = true;
    Nibbles nibbles;
    const uint8_t *scales, *zeros;
    PanelUINT4(const uint8_t* block, size_t slabs)
        : nibbles{block}, scales(block + 256 * slabs), zeros(scales + 32 * slabs) {}
    void lines(size_t slab, size_t j, Bytes& even, Bytes& odd) const { nibbles.codes(slab, j, even, odd); }
    Floats scale(size_t slab, size_t) const { return load_halves(scales + 32 * slab); }
    Floats minimum(size_t slab, size_t) const { return times(scale(slab, 0), load_unsigned(row_zeros(slab))); }
    const uint8_t* row_zeros(size_t slab) const { return zeros + 16 * slab; }
};

}  // namespace
}  // namespace ktqueue
