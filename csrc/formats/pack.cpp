// Converts rows of GGUF blocks to panels: writes the codes of each superblock of a row to the planes.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "formats/packed_matrix.h"
#include "formats/row_block.h"

namespace ktqueue {

namespace {

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

// Bit 2 of the codes of each 8 columns, which all have the same.
void write_deltas(const RowBlock& row, size_t slabs, size_t r, uint8_t* plane) {
    for (size_t j = 0; j < slabs * 4; ++j)
        plane[2 * j + r / 8] |= static_cast<uint8_t>((row.codes[8 * j] >> 2 & 1) << (r % 8));
}

void write_bytes(const RowBlock& row, size_t slabs, size_t r, uint8_t* plane) {
    for (size_t line = 0; line < slabs * 8; ++line) put(plane + 64 * line + 4 * r, word(row.codes + 4 * line));
}

// Writes `count` entries of `bytes` bytes each: entry i of row r.
uint8_t* write_scales(const uint8_t* entries, size_t count, size_t bytes, size_t r, uint8_t* target) {
    for (size_t i = 0; i < count; ++i) std::memcpy(target + (i * kPanelRows + r) * bytes, entries + i * bytes, bytes);
    return target + count * kPanelRows * bytes;
}

void write_fp8(const RowBlock& row, size_t slabs, size_t r, uint8_t* out) {
    for (size_t line = 0; line < slabs * 8; ++line) {
        const size_t at = line / (8 * kFP8Slabs) * kFP8Bytes + line % (8 * kFP8Slabs) * 64;
        put(out + at + 4 * r, word(row.codes + 4 * line));
    }
    for (size_t s = 0; s < slabs; s += kFP8Slabs)
        std::memcpy(out + (s / kFP8Slabs + 1) * kFP8Bytes - 64 + 4 * r, row.scales + s, 4);
}

void write_planes(Quant quant, const RowBlock& row, size_t slabs, size_t r, uint8_t* out) {
    const auto nibbles = [&] {
        write_nibbles(row, slabs, r, out);
        return out + 256 * slabs;
    };
    const auto write_half = [&](uint8_t* target, const uint8_t* half) { return write_scales(half, 1, 2, r, target); };
    uint8_t* target = out;
    switch (panel_format(quant)) {
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
        case Quant::NVFP4:
            target = write_scales(row.scales, 2 * slabs, 1, r, nibbles());
            target = write_scales(reinterpret_cast<const uint8_t*>(&row.factor), 1, 4, r, target);
            write_scales(reinterpret_cast<const uint8_t*>(&row.rest), 1, 4, r, target);
            break;
        case Quant::Q4_1:
        case Quant::Q5_1:
            target = nibbles();
            if (quant == Quant::Q5_1) {
                write_bits<4>(row, slabs, r, target);
                target += 64 * slabs;
            }
            target = write_scales(row.scales, slabs, 2, r, target);
            write_scales(row.scales + 2 * kSlabs, slabs, 2, r, target);
            break;
        case Quant::UINT4:
            write_scales(row.minimums, slabs, 1, r, write_scales(row.scales, slabs, 2, r, nibbles()));
            break;
        case Quant::FP8:
            write_fp8(row, slabs, r, out);
            break;
        case Quant::IQ2_S:
            write_pairs<0>(row, slabs, r, out);
            write_bits<2>(row, slabs, r, out + 128 * slabs);
            write_half(write_scales(row.scales, slabs, 1, r, out + 192 * slabs), row.d);
            break;
        case Quant::IQ1_M:
            write_pairs<0>(row, slabs, r, out);
            write_deltas(row, slabs, r, out + 128 * slabs);
            write_half(write_scales(row.scales, slabs, 1, r, out + 136 * slabs), row.d);
            break;
        case Quant::IQ4_XS:
        case Quant::IQ3_XXS:
        case Quant::IQ3_S:
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
