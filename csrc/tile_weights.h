// A slab of a packed panel as one operand of a tile product: 16 rows of 64 bytes, row i holding columns 2i and 2i + 1 of
// each of the panel's rows side by side, as bf16 rounded to nearest even.
// Included only by translation units of one instruction set, after lanes_avx512.h and panel_format.h; needs AVX-512 BF16;
// internal linkage.
//
// Codes become floats without a conversion: put into the mantissa of 2^n they are the number 2^n + code, and one fused
// multiply-add takes scale * 2^n away together with the format's offset or minimum. What it takes away is rounded once,
// to 2^-24 of itself; n is small enough that this is lost in the rounding to bf16, and nothing at all without minimums.
#pragma once

namespace ktqueue {
namespace {

// The bits of `words` from Bit to Bit + Width - 1 as numbers 2^(23 - Bit) + code.
template <int Bit, int Width>
inline Floats embedded(__m512i words) {
    constexpr int kMask = ((1 << Width) - 1) << Bit, kPower = (127 + 23 - Bit) << 23;
    constexpr int kAndThenOr = 0xea;
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(words, _mm512_set1_epi32(kMask), _mm512_set1_epi32(kPower), kAndThenOr));
}

// scale * (code - offset) - minimum, as embedded() gives the code.
template <class Format>
class Unembed {
  public:
    Unembed(const Format& format, size_t slab, size_t half) : scale_(format.scale(slab, half)) {
        constexpr float kOffset = activation_kind(Format::kQuant).offset;
        for (int i = 0; i < 3; ++i) {
            const Floats base = splat_float(kOffset + static_cast<float>(1 << (12 - 4 * i)));
            if constexpr (Format::kMinimums) {
                bases_[i] = fused(scale_, base, format.minimum(slab, half));
            } else {
                bases_[i] = times(scale_, base);
            }
        }
    }

    template <int Bit, int Width>
    Floats weights(__m512i words) const {
        static_assert(Bit == 11 || Bit == 15 || Bit == 19);
        return _mm512_fmsub_ps(embedded<Bit, Width>(words), scale_, bases_[(Bit - 11) / 4]);
    }

  private:
    Floats scale_;
    Floats bases_[3];  // for codes from bit 11, 15 and 19
};

constexpr bool has_linear_nibbles(Quant quant) {
    return quant == Quant::Q4_0 || quant == Quant::Q4_K;
}

constexpr bool has_table(Quant quant) {
    return quant == Quant::IQ4_NL || quant == Quant::IQ4_XS || quant == Quant::MXFP4;
}

// A slab as floats, eight columns at a time. What its columns share is worked out first: the compiler cannot know that
// storing a tile leaves the scales alone.
template <class Format>
class SlabWeights {
  public:
    SlabWeights(const Format& format, size_t slab)
        : format_(format), slab_(slab), halves_{{format, slab, 0}, {format, slab, kHalves ? 1 : 0}} {}

    void columns(size_t j, Floats (&w)[8]) const {
        const Unembed<Format>& unembed = halves_[kHalves ? j / 2 : 0];
        if constexpr (has_linear_nibbles(Format::kQuant)) {
            const __m512i codes = load_bytes(format_.nibbles.block + slab_ * 256 + j * 64);
            const __m512i low = _mm512_slli_epi32(codes, 11), middle = _mm512_slli_epi32(codes, 3),
                          high = _mm512_srli_epi32(codes, 9);
            w[0] = unembed.template weights<11, 4>(low);
            w[4] = unembed.template weights<15, 4>(low);
            w[1] = unembed.template weights<19, 4>(low);
            w[5] = unembed.template weights<15, 4>(middle);
            w[2] = unembed.template weights<19, 4>(middle);
            w[6] = unembed.template weights<11, 4>(high);
            w[3] = unembed.template weights<15, 4>(high);
            w[7] = unembed.template weights<19, 4>(high);
        } else {
            Bytes lines[2];
            format_.lines(slab_, j, lines[0], lines[1]);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                w[4 * i + 0] = unembed.template weights<15, 8>(_mm512_slli_epi32(lines[i], 15));
                w[4 * i + 1] = unembed.template weights<15, 8>(_mm512_slli_epi32(lines[i], 7));
                w[4 * i + 2] = unembed.template weights<15, 8>(_mm512_srli_epi32(lines[i], 1));
                w[4 * i + 3] = unembed.template weights<15, 8>(_mm512_srli_epi32(lines[i], 9));
            }
        }
    }

  private:
    static constexpr bool kHalves = activation_kind(Format::kQuant).halves;
    const Format& format_;
    size_t slab_;
    Unembed<Format> halves_[2];
};

// Formats whose nibbles are places in a table.
template <class Format>
    requires(has_table(Format::kQuant))
class SlabWeights<Format> {
  public:
    SlabWeights(const Format& format, size_t slab)
        : codes_(format.nibbles.block + slab * 256), scale_(format.scale(slab, 0)) {
        const int8_t* values = Format::kQuant == Quant::MXFP4 ? kMXFP4Values : kIQ4Values;
        table_ = load_signed(reinterpret_cast<const uint8_t*>(values));
    }

    void columns(size_t j, Floats (&w)[8]) const {
        const __m512i codes = load_bytes(codes_ + j * 64);
#pragma GCC unroll 8
        for (unsigned n = 0; n < 8; ++n)  // the permutation looks at the lowest four bits alone
            w[n / 2 + n % 2 * 4] = times(_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * n), table_), scale_);
    }

  private:
    const uint8_t* codes_;
    Floats scale_, table_;
};

template <class Format>
    requires(is_float(Format::kQuant))
class SlabWeights<Format> {
  public:
    SlabWeights(const Format& format, size_t slab) : format_(format), slab_(slab) {}

    void columns(size_t j, Floats (&w)[8]) const { format_.floats(slab_, j, w); }

  private:
    const Format& format_;
    size_t slab_;
};

// Two columns of 16 rows as one row of a tile.
inline void store_tile_row(Floats even, Floats odd, uint8_t* target) {
    alignas(64) static constexpr uint16_t kInTurn[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    _mm512_store_si512(target, _mm512_permutexvar_epi16(_mm512_load_si512(kInTurn), both));
}

// Slab `slab` of a superblock to the 1 KB at `tile`.
template <class Format>
inline void store_tile(const Format& format, size_t slab, uint8_t* tile) {
    const SlabWeights<Format> weights(format, slab);
#pragma GCC unroll 4
    for (size_t j = 0; j < 4; ++j) {
        Floats w[8];
        weights.columns(j, w);
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; ++i) store_tile_row(w[2 * i], w[2 * i + 1], tile + (4 * j + i) * 64);
    }
}

}  // namespace
}  // namespace ktqueue
