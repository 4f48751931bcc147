#include "formats/row_block.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "formats/grid_block.h"
#include "formats/half.h"

namespace ktqueue {

namespace {

void low_then_high(const uint8_t* q, size_t count, uint8_t* codes) {
    for (size_t i = 0; i < count; ++i) {
        codes[i] = q[i] & 15;
        codes[count + i] = q[i] >> 4;
    }
}

// Formats whose own block is a slab: a scale of `ScaleBytes` bytes, then codes.
template <size_t ScaleBytes>
void read_slabs(const uint8_t* source, size_t slabs, RowBlock& out) {
    constexpr size_t kBytes = ScaleBytes + 16;
    for (size_t s = 0; s < slabs; ++s) {
        std::memcpy(out.scales + ScaleBytes * s, source + s * kBytes, ScaleBytes);
        low_then_high(source + s * kBytes + ScaleBytes, 16, out.codes + s * kSlab);
    }
}

void read_q8_0(const uint8_t* source, size_t slabs, RowBlock& out) {
    for (size_t s = 0; s < slabs; ++s, source += 34) {
        std::memcpy(out.scales + 2 * s, source, 2);
        for (size_t i = 0; i < kSlab; ++i) out.codes[s * kSlab + i] = source[2 + i] ^ 0x80;
    }
}

// d of each slab in `scales`, followed by 16 bytes with m.
void read_with_minimum(const uint8_t* source, size_t slabs, size_t bytes, RowBlock& out) {  // Q4_1, Q5_1
    for (size_t s = 0; s < slabs; ++s, source += bytes) {
        std::memcpy(out.scales + 2 * s, source, 2);
        std::memcpy(out.scales + 2 * (kSlabs + s), source + 2, 2);
        low_then_high(source + bytes - 16, 16, out.codes + s * kSlab);
        if (bytes == 24)
            for (size_t i = 0; i < kSlab; ++i)
                out.codes[s * kSlab + i] |= static_cast<uint8_t>((source[4 + i / 8] >> i % 8 & 1) << 4);
    }
}

void read_uint4(const uint8_t* source, size_t slabs, RowBlock& out) {
    for (size_t s = 0; s < slabs; ++s, source += 19) {
        std::memcpy(out.scales + 2 * s, source, 2);
        out.minimums[s] = source[2];
        low_then_high(source + 3, 16, out.codes + s * kSlab);
    }
}

void read_fp8(const uint8_t* source, size_t slabs, RowBlock& out) {
    for (size_t s = 0; s < slabs; s += kFP8Slabs, source += 132) {
        std::memcpy(out.scales + s, source, 4);
        std::memcpy(out.codes + s * kSlab, source + 4, 128);
    }
}

// Eight 6-bit scales and minimums of Q4_K and Q5_K: see formats/quant_format.h.
void read_six_bits(const uint8_t* s, RowBlock& out) {
    for (size_t g = 0; g < 4; ++g) {
        out.scales[g] = s[g] & 63;
        out.minimums[g] = s[g + 4] & 63;
        out.scales[g + 4] = static_cast<uint8_t>((s[g + 8] & 15) | (s[g] >> 6) << 4);
        out.minimums[g + 4] = static_cast<uint8_t>((s[g + 8] >> 4) | (s[g + 4] >> 6) << 4);
    }
}

// Adds bit g of h[i] to code i of group g, as its bit `place`: Q3_K's third bits and Q5_K's fifth ones.
void add_upper_bits(const uint8_t* h, int place, RowBlock& out) {
    for (size_t g = 0; g < 8; ++g)
        for (size_t i = 0; i < 32; ++i)
            out.codes[32 * g + i] = static_cast<uint8_t>(out.codes[32 * g + i] | (h[i] >> g & 1) << place);
}

void read_q4_k(const uint8_t* source, const uint8_t* nibbles, RowBlock& out) {  // and Q5_K without its fifth bits
    std::memcpy(out.d, source, 2);
    std::memcpy(out.dmin, source + 2, 2);
    read_six_bits(source + 4, out);
    for (size_t n = 0; n < 4; ++n) low_then_high(nibbles + 32 * n, 32, out.codes + 64 * n);
}

void read_q6_k(const uint8_t* source, RowBlock& out) {
    for (size_t n = 0; n < 2; ++n)
        for (size_t k = 0; k < 4; ++k)
            for (size_t i = 0; i < 32; ++i) {
                const uint8_t low = source[64 * n + 32 * (k % 2) + i];
                const uint8_t high = source[128 + 32 * n + i] >> (2 * k) & 3;
                out.codes[128 * n + 32 * k + i] = static_cast<uint8_t>((k < 2 ? low & 15 : low >> 4) | high << 4);
            }
    std::memcpy(out.scales, source + 192, 16);
    std::memcpy(out.d, source + 208, 2);
}

void read_iq4_xs(const uint8_t* source, RowBlock& out) {
    std::memcpy(out.d, source, 2);
    const unsigned high = static_cast<unsigned>(source[2]) | static_cast<unsigned>(source[3]) << 8;
    for (size_t g = 0; g < 8; ++g) {
        const unsigned scale = (source[4 + g / 2] >> (4 * (g % 2)) & 15u) | (high >> (2 * g) & 3u) << 4;
        out.scales[g] = static_cast<uint8_t>(scale - 32);
        low_then_high(source + 8 + 16 * g, 16, out.codes + 32 * g);
    }
}

void read_pairs(const uint8_t* q, RowBlock& out) {  // of Q2_K and Q3_K
    for (size_t n = 0; n < 2; ++n)
        for (size_t k = 0; k < 4; ++k)
            for (size_t i = 0; i < 32; ++i) out.codes[128 * n + 32 * k + i] = q[32 * n + i] >> (2 * k) & 3;
}

void read_q3_k(const uint8_t* source, RowBlock& out) {
    read_pairs(source + 32, out);
    add_upper_bits(source, 2, out);
    const uint8_t* s = source + 96;
    for (size_t k = 0; k < 16; ++k) {
        const unsigned low = k < 8 ? s[k] & 15u : s[k - 8] >> 4;
        out.scales[k] = static_cast<uint8_t>((low | (s[8 + k % 4] >> (2 * (k / 4)) & 3u) << 4) - 32);
    }
    std::memcpy(out.d, source + 108, 2);
}

void read_q2_k(const uint8_t* source, RowBlock& out) {
    std::memcpy(out.scales, source, 16);
    read_pairs(source + 16, out);
    std::memcpy(out.d, source + 80, 2);
    std::memcpy(out.dmin, source + 82, 2);
}

void read_nvfp4(const uint8_t* source, size_t slabs, RowBlock& out) {
    for (size_t k = 0; k < 2 * slabs; ++k) {
        const uint8_t* block = source + k / 4 * 36;
        out.scales[k] = scale_of_nvfp4(block[k % 4]);
        low_then_high(block + 4 + k % 4 * 8, 8, out.codes + 16 * k);
    }
    out.factor = 1;
    out.rest = 0;
}

void read_fp4(const uint8_t* source, size_t slabs, RowBlock& out) {
    for (size_t k = 0; k < 2 * slabs; ++k) {
        const uint8_t* block = source + k / 4 * 44;
        if (std::memcmp(block, source, 8) != 0)
            throw std::invalid_argument("blocks of a row of FP4 have different factors");
        out.scales[k] = block[8 + k % 4] & 127;
        low_then_high(block + 12 + k % 4 * 8, 8, out.codes + 16 * k);
    }
    std::memcpy(&out.factor, source, 4);
    std::memcpy(&out.rest, source + 4, 4);
}

// The code of a value of GridBlock: the place of the value in the table of the format's panels.
uint8_t grid_code(Quant quant, int value) {
    if (quant == Quant::IQ3_S) return static_cast<uint8_t>((value + 15) / 2);
    if (quant == Quant::IQ3_XXS) return static_cast<uint8_t>((value + 62) / 8);
    if (panel_format(quant) == Quant::IQ2_S) return static_cast<uint8_t>(std::abs(value) / 17 | (value < 0 ? 4 : 0));
    return static_cast<uint8_t>((value + 9) >> 3 | ((value + 9) & 2) << 1);
}

void read_grid(Quant quant, const uint8_t* source, RowBlock& out) {
    GridBlock block;
    read_grid_block(quant, source, block);
    std::memcpy(out.d, block.d, 2);
    for (size_t i = 0; i < kSuperblock; ++i) out.codes[i] = grid_code(quant, block.values[i]);
    const bool one = quant == Quant::IQ3_XXS || quant == Quant::IQ3_S;  // one scale a slab
    for (size_t s = 0; s < kSlabs; ++s) {
        const unsigned first = block.scales[2 * s], second = block.scales[2 * s + 1];
        out.scales[s] = static_cast<uint8_t>(one ? first : first >> 1 | second >> 1 << 4);
    }
}

}  // namespace

bool finite_half(const uint8_t* half) {
    return (half[1] & 0x7c) != 0x7c;
}

void read_block(Quant quant, const uint8_t* source, size_t slabs, RowBlock& out) {
    switch (quant) {
        case Quant::Q4_0:
        case Quant::IQ4_NL:
            read_slabs<2>(source, slabs, out);
            break;
        case Quant::MXFP4:
            read_slabs<1>(source, slabs, out);
            break;
        case Quant::Q8_0:
            read_q8_0(source, slabs, out);
            break;
        case Quant::Q4_K:
            read_q4_k(source, source + 16, out);
            break;
        case Quant::Q5_K:
            read_q4_k(source, source + 48, out);
            add_upper_bits(source + 16, 4, out);
            break;
        case Quant::Q6_K:
            read_q6_k(source, out);
            break;
        case Quant::IQ4_XS:
            read_iq4_xs(source, out);
            break;
        case Quant::Q3_K:
            read_q3_k(source, out);
            break;
        case Quant::Q2_K:
            read_q2_k(source, out);
            break;
        case Quant::NVFP4:
            read_nvfp4(source, slabs, out);
            break;
        case Quant::FP4:
            read_fp4(source, slabs, out);
            break;
        case Quant::Q4_1:
            read_with_minimum(source, slabs, 20, out);
            break;
        case Quant::Q5_1:
            read_with_minimum(source, slabs, 24, out);
            break;
        case Quant::UINT4:
            read_uint4(source, slabs, out);
            break;
        case Quant::FP8:
            read_fp8(source, slabs, out);
            break;
        default:
            read_grid(quant, source, out);
    }
}

bool block_is_finite(Quant quant, const RowBlock& block, size_t slabs) {
    switch (quant) {
        case Quant::Q4_0:
        case Quant::IQ4_NL:
        case Quant::Q8_0:
        case Quant::UINT4:
            for (size_t s = 0; s < slabs; ++s)
                if (!finite_half(block.scales + 2 * s)) return false;
            return true;
        case Quant::MXFP4:  // 255 is NaN
            for (size_t s = 0; s < slabs; ++s)
                if (block.scales[s] == 255) return false;
            return true;
        case Quant::NVFP4:
            return true;
        case Quant::FP4:  // 127 is NaN
            return std::isfinite(block.factor) && std::isfinite(block.rest) &&
                   std::none_of(block.scales, block.scales + 2 * slabs, [](uint8_t scale) { return scale == 127; });
        case Quant::Q4_1:
        case Quant::Q5_1:
            for (size_t s = 0; s < slabs; ++s)
                if (!finite_half(block.scales + 2 * s) || !finite_half(block.scales + 2 * (kSlabs + s))) return false;
            return true;
        case Quant::FP8:  // 127 and 255 are NaN
            for (size_t s = 0; s < slabs; s += kFP8Slabs)
                if ((block.scales[s + 3] & 0x7f) == 0x7f && (block.scales[s + 2] & 0x80)) return false;
            return std::none_of(block.codes, block.codes + slabs * kSlab,
                                [](uint8_t code) { return (code & 0x7f) == 0x7f; });
        case Quant::Q4_K:
        case Quant::Q5_K:
        case Quant::Q2_K:
            return finite_half(block.d) && finite_half(block.dmin);
        default:
            return finite_half(block.d);
    }
}

float block_bound(Quant quant, const RowBlock& block, size_t slabs) {
    const float d = std::fabs(half_to_float(block.d)), dmin = std::fabs(half_to_float(block.dmin));
    const auto slab_bound = [&](float code, size_t first = 0) {
        float most = 0;
        for (size_t s = first; s < first + slabs; ++s)
            most = std::max(most, std::fabs(half_to_float(block.scales + 2 * s)));
        return most * code;
    };
    switch (quant) {
        case Quant::Q4_0:
            return slab_bound(8);
        case Quant::Q8_0:
        case Quant::IQ4_NL:
            return slab_bound(128);
        case Quant::MXFP4:
            return std::ldexp(12.0f, *std::max_element(block.scales, block.scales + slabs) - 128);
        case Quant::Q4_K:
        case Quant::Q5_K:
            return 63 * 31 * d + 63 * dmin;
        case Quant::Q6_K:
        case Quant::IQ4_XS:
            return 32 * 128 * d;
        case Quant::Q3_K:
            return 32 * 4 * d;
        case Quant::Q2_K:
            return 15 * 3 * d + 15 * dmin;
        case Quant::NVFP4:
        case Quant::FP4: {
            const uint8_t largest = *std::max_element(block.scales, block.scales + 2 * slabs);
            const float factor = std::fabs(block.factor) + std::fabs(block.rest);
            return 6 * e4m3_to_float(largest) * factor * (1 + 0x1p-20f);  // of more bits than a float has
        }
        case Quant::Q4_1:
            return slab_bound(15) + slab_bound(1, kSlabs);
        case Quant::Q5_1:
            return slab_bound(31) + slab_bound(1, kSlabs);
        case Quant::UINT4:
            return slab_bound(15 + static_cast<float>(*std::max_element(block.minimums, block.minimums + slabs)));
        case Quant::FP8: {
            float largest = 0, d;
            for (size_t s = 0; s < slabs; s += kFP8Slabs) {
                std::memcpy(&d, block.scales + s, 4);
                largest = std::max(largest, std::fabs(d));
            }
            return 448 * largest;
        }
        default:  // with a grid: the largest scale times the largest value
            return grid_unit(quant) *
                   (quant == Quant::IQ3_XXS ? 31 * 62
                    : quant == Quant::IQ3_S ? 31 * 15
                                            : 31 * 43) *
                   d;
    }
}

}  // namespace ktqueue
