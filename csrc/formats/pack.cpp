// Converts rows of GGUF blocks to panels: reads one superblock of a row as plain codes, then writes them to the planes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "formats/half.h"
#include "formats/packed_matrix.h"

namespace ktqueue {

namespace {

bool finite_half(const uint8_t* half) {
    return (half[1] & 0x7c) != 0x7c;
}

// One superblock of one row: `slabs` * 32 codes, and scales as formats/panel_layout.h stores them.
struct RowBlock {
    uint8_t codes[kSuperblock];
    uint8_t scales[32];  // up to two bytes a slab
    uint8_t minimums[kSlabs];
    uint8_t d[2], dmin[2];
};

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

// Eight 6-bit scales and minimums of Q4_K and Q5_K: see formats/quant_format.h.
void read_six_bits(const uint8_t* s, RowBlock& out) {
    for (size_t g = 0; g < 4; ++g) {
        out.scales[g] = s[g] & 63;
        out.minimums[g] = s[g + 4] & 63;
        out.scales[g + 4] = static_cast<uint8_t>((s[g + 8] & 15) | (s[g] >> 6) << 4);
        out.minimums[g + 4] = static_cast<uint8_t>((s[g + 8] >> 4) | (s[g + 4] >> 6) << 4);
    }
}

void read_q4_k(const uint8_t* source, RowBlock& out) {
    std::memcpy(out.d, source, 2);
    std::memcpy(out.dmin, source + 2, 2);
    read_six_bits(source + 4, out);
    for (size_t n = 0; n < 4; ++n) low_then_high(source + 16 + 32 * n, 32, out.codes + 64 * n);
}

void read_q5_k(const uint8_t* source, RowBlock& out) {
    std::memcpy(out.d, source, 2);
    std::memcpy(out.dmin, source + 2, 2);
    read_six_bits(source + 4, out);
    for (size_t n = 0; n < 4; ++n) low_then_high(source + 48 + 32 * n, 32, out.codes + 64 * n);
    for (size_t g = 0; g < 8; ++g)
        for (size_t i = 0; i < 32; ++i)
            out.codes[32 * g + i] = static_cast<uint8_t>(out.codes[32 * g + i] | (source[16 + i] >> g & 1) << 4);
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
    for (size_t g = 0; g < 8; ++g)
        for (size_t i = 0; i < 32; ++i)
            out.codes[32 * g + i] = static_cast<uint8_t>(out.codes[32 * g + i] | (source[i] >> g & 1) << 2);
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

// Reads one superblock of a row.
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
            read_q4_k(source, out);
            break;
        case Quant::Q5_K:
            read_q5_k(source, out);
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
        default:
            break;
    }
}

bool block_is_finite(Quant quant, const RowBlock& block, size_t slabs) {
    switch (quant) {
        case Quant::Q4_0:
        case Quant::IQ4_NL:
        case Quant::Q8_0:
            for (size_t s = 0; s < slabs; ++s)
                if (!finite_half(block.scales + 2 * s)) return false;
            return true;
        case Quant::MXFP4:  // 255 is NaN
            for (size_t s = 0; s < slabs; ++s)
                if (block.scales[s] == 255) return false;
            return true;
        case Quant::Q4_K:
        case Quant::Q5_K:
        case Quant::Q2_K:
            return finite_half(block.d) && finite_half(block.dmin);
        default:
            return finite_half(block.d);
    }
}

// An upper bound of the magnitude of weights and of the terms they are computed from. Scales count as large as their
// bits allow, which the largest scale of a superblock nearly is.
float block_bound(Quant quant, const RowBlock& block, size_t slabs) {
    const float d = std::fabs(half_to_float(block.d)), dmin = std::fabs(half_to_float(block.dmin));
    const auto slab_bound = [&](float code) {
        float most = 0;
        for (size_t s = 0; s < slabs; ++s) most = std::max(most, std::fabs(half_to_float(block.scales + 2 * s)));
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
        default:
            return 0;
    }
}

uint32_t word(const uint8_t* bytes) {
    uint32_t value;
    std::memcpy(&value, bytes, 4);
    return value;
}

void put(uint8_t* target, uint32_t value) {
    std::memcpy(target, &value, 4);
}

// The planes of row r. Four codes, which are four columns of one line, are one word.
void write_nibbles(const RowBlock& row, size_t slabs, size_t r, uint8_t* plane) {
    for (size_t i = 0; i < slabs * 4; ++i) {
        const uint32_t even = word(row.codes + 8 * i) & 0x0f0f0f0fu, odd = word(row.codes + 8 * i + 4) & 0x0f0f0f0fu;
        put(plane + 64 * i + 4 * r, even | odd << 4);
    }
}

template <int Shift>
void write_pairs(const RowBlock& row, size_t slabs, size_t r, uint8_t* plane) {
    for (size_t i = 0; i < slabs * 2; ++i) {
        uint32_t all = 0;
        for (size_t k = 0; k < 4; ++k) all |= (word(row.codes + 16 * i + 4 * k) >> Shift & 0x03030303u) << (2 * k);
        put(plane + 64 * i + 4 * r, all);
    }
}

template <int Shift>
void write_bits(const RowBlock& row, size_t slabs, size_t r, uint8_t* plane) {
    for (size_t line = 0; line < slabs * 8; ++line) {
        const uint32_t bits = word(row.codes + 4 * line) >> Shift & 0x01010101u;
        const uint32_t four = (bits * 0x01020408u) >> 24;  // the bit of byte i becomes bit i
        plane[8 * line + r / 2] |= static_cast<uint8_t>(four << (4 * (r % 2)));
    }
}

void write_bytes(const RowBlock& row, size_t slabs, size_t r, uint8_t* plane) {
    for (size_t line = 0; line < slabs * 8; ++line) put(plane + 64 * line + 4 * r, word(row.codes + 4 * line));
}

// Writes `count` entries of `bytes` bytes each: entry i of row r.
uint8_t* write_scales(const uint8_t* entries, size_t count, size_t bytes, size_t r, uint8_t* target) {
    for (size_t i = 0; i < count; ++i) std::memcpy(target + (i * kPanelRows + r) * bytes, entries + i * bytes, bytes);
    return target + count * kPanelRows * bytes;
}

void write_planes(Quant quant, const RowBlock& row, size_t slabs, size_t r, uint8_t* out) {
    const auto nibbles = [&] {
        write_nibbles(row, slabs, r, out);
        return out + 256 * slabs;
    };
    const auto write_half = [&](uint8_t* target, const uint8_t* half) { return write_scales(half, 1, 2, r, target); };
    uint8_t* target = out;
    switch (quant) {
        case Quant::Q8_0:
            write_bytes(row, slabs, r, out);
            write_scales(row.scales, slabs, 2, r, out + 512 * slabs);
            break;
        case Quant::Q4_0:
        case Quant::IQ4_NL:
            write_scales(row.scales, slabs, 2, r, nibbles());
            break;
        case Quant::MXFP4:
            write_scales(row.scales, slabs, 1, r, nibbles());
            break;
        case Quant::IQ4_XS:
            write_half(write_scales(row.scales, slabs, 1, r, nibbles()), row.d);
            break;
        case Quant::Q4_K:
        case Quant::Q5_K:
            target = nibbles();
            if (quant == Quant::Q5_K) {
                write_bits<4>(row, slabs, r, target);
                target += 64 * slabs;
            }
            target = write_scales(row.scales, slabs, 1, r, target);
            target = write_scales(row.minimums, slabs, 1, r, target);
            write_half(write_half(target, row.d), row.dmin);
            break;
        case Quant::Q6_K:
            target = nibbles();
            write_pairs<4>(row, slabs, r, target);
            write_half(write_scales(row.scales, 2 * slabs, 1, r, target + 128 * slabs), row.d);
            break;
        case Quant::Q3_K:
            write_pairs<0>(row, slabs, r, out);
            write_bits<2>(row, slabs, r, out + 128 * slabs);
            write_half(write_scales(row.scales, 2 * slabs, 1, r, out + 192 * slabs), row.d);
            break;
        case Quant::Q2_K:
            write_pairs<0>(row, slabs, r, out);
            write_half(write_half(write_scales(row.scales, 2 * slabs, 1, r, out + 128 * slabs), row.d), row.dmin);
            break;
        default:
            break;
    }
}

bool float_is_finite(Quant quant, const uint8_t* weight) {
    if (quant == Quant::F16) return finite_half(weight);
    const uint8_t* upper = quant == Quant::F32 ? weight + 2 : weight;  // sign, exponent and some of the mantissa
    return (upper[1] & 0x7f) != 0x7f || (upper[0] & 0x80) == 0;
}

bool pack_floats(Quant quant, const uint8_t* row, size_t columns, size_t r, uint8_t* out, float&) {
    const size_t bytes = quant == Quant::F32 ? 4 : 2;
    bool finite = true;
    for (size_t c = 0; c < columns; ++c) {
        const uint8_t* weight = row + c * bytes;
        finite = finite && float_is_finite(quant, weight);
        const size_t place = quant == Quant::BF16 ? (c / 2 * kPanelRows + r) * 2 + c % 2 : c * kPanelRows + r;
        std::memcpy(out + place * bytes, weight, bytes);
    }
    return finite;
}

bool pack_blocks(Quant quant, const uint8_t* row, size_t columns, size_t r, uint8_t* out, float& most) {
    const QuantFormat& format = quant_format(quant);
    RowBlock block{};
    bool finite = true;
    for (size_t c = 0; c < columns; c += kSuperblock, out += superblock_bytes(quant)) {
        const size_t slabs = columns - c < kSuperblock ? (columns - c) / kSlab : kSlabs;
        read_block(quant, row + c / format.block_weights * format.block_bytes, slabs, block);
        finite = finite && block_is_finite(quant, block, slabs);
        most = std::max(most, block_bound(quant, block, slabs));
        write_planes(quant, block, slabs, r, out);
    }
    return finite;
}

}  // namespace

float pack_panel(const StoredMatrix& matrix, size_t panel, uint8_t* out) {
    const size_t bytes = row_bytes(matrix.quant, matrix.columns);
    std::memset(out, 0, panel_bytes(matrix.quant, matrix.columns));
    float most = 0;
    for (size_t r = 0; r < kPanelRows && panel * kPanelRows + r < matrix.rows; ++r) {
        const size_t row = panel * kPanelRows + r;
        const auto pack = is_float(matrix.quant) ? pack_floats : pack_blocks;
        if (!pack(matrix.quant, matrix.data + row * bytes, matrix.columns, r, out, most))
            throw std::invalid_argument("row " + std::to_string(row) + " has a scale or weight that is not finite");
    }
    return most;
}

}  // namespace ktqueue
