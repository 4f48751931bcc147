#include "formats/grid_block.h"

#include <bit>
#include <cstring>

#include "formats/grids.h"

namespace ktqueue {

namespace {

constexpr int8_t kMagnitudes2[4] = {8, 25, 43, 0};                   // of IQ2; no grid has the last one
constexpr int8_t kMagnitudes3[8] = {4, 12, 20, 28, 36, 44, 52, 62};  // of IQ3_XXS; those of IQ3_S are 1, 3, .. 15

template <size_t Count>
struct Grid {
    uint16_t entries[Count];
    constexpr explicit Grid(const uint16_t (&steps)[Count]) : entries() {
        uint16_t sum = 0;
        for (size_t i = 0; i < Count; ++i) entries[i] = sum = static_cast<uint16_t>(sum + steps[i]);
    }
};

constexpr Grid kIQ2XXSGrid(kIQ2XXSSteps);
constexpr Grid kIQ2XSGrid(kIQ2XSSteps);
constexpr Grid kIQ2SGrid(kIQ2SSteps);
constexpr Grid kIQ3XXSGrid(kIQ3XXSSteps);
constexpr Grid kIQ3SGrid(kIQ3SSteps);
constexpr Grid kIQ1SGrid(kIQ1SSteps);
static_assert(std::size(kIQ2XXSSteps) == 256 && std::size(kIQ2XSSteps) == 512 && std::size(kIQ2SSteps) == 1024);
static_assert(std::size(kIQ3XXSSteps) == 256 && std::size(kIQ3SSteps) == 512 && std::size(kIQ1SSteps) == 2048);

unsigned word16(const uint8_t* bytes) {
    return bytes[0] | static_cast<unsigned>(bytes[1]) << 8;
}

uint32_t word32(const uint8_t* bytes) {
    return word16(bytes) | static_cast<uint32_t>(word16(bytes + 2)) << 16;
}

// Signs of eight weights stored as seven: an even number of them is negative.
unsigned eight_signs(unsigned seven) {
    seven &= 127;
    return seven | (static_cast<unsigned>(std::popcount(seven)) & 1) << 7;
}

int8_t with_sign(int magnitude, unsigned negative) {
    return static_cast<int8_t>(negative & 1 ? -magnitude : magnitude);
}

void put_iq2(unsigned entry, unsigned signs, int8_t* values) {  // 8 weights
    for (unsigned c = 0; c < 8; ++c) values[c] = with_sign(kMagnitudes2[entry >> (2 * c) & 3], signs >> c);
}

template <Quant Format>
void put_iq3(unsigned entry, unsigned signs, int8_t* values) {  // 4 weights
    for (unsigned c = 0; c < 4; ++c) {
        const unsigned i = entry >> (4 * c) & 7;
        values[c] = with_sign(Format == Quant::IQ3_S ? static_cast<int>(2 * i + 1) : kMagnitudes3[i], signs >> c);
    }
}

// 8 weights: eight times -1, 0 or 1, plus 1 or minus 1.
void put_iq1(unsigned index, bool minus, int8_t* values) {
    const unsigned entry = kIQ1SGrid.entries[index];
    for (unsigned c = 0; c < 8; ++c) {
        const int three = static_cast<int>(entry >> (2 * c) & 3) - 1;
        values[c] = static_cast<int8_t>(8 * three + (minus ? -1 : 1));
    }
}

// Four bits s become the scale 2s + 1.
uint8_t odd_scale(unsigned s) {
    return static_cast<uint8_t>(2 * (s & 15) + 1);
}

// Scales of 16 weights each, two in a byte.
void read_nibble_scales(const uint8_t* source, GridBlock& out) {
    for (size_t i = 0; i < 16; ++i) out.scales[i] = odd_scale(source[i / 2] >> (4 * (i % 2)));
}

void read_iq2_xxs(const uint8_t* source, GridBlock& out) {
    for (size_t g = 0; g < 8; ++g) {
        const uint8_t* indices = source + 2 + 8 * g;
        const uint32_t rest = word32(indices + 4);
        out.scales[2 * g] = out.scales[2 * g + 1] = odd_scale(rest >> 28);
        for (size_t i = 0; i < 4; ++i)
            put_iq2(kIQ2XXSGrid.entries[indices[i]], eight_signs(rest >> (7 * i)), out.values + 32 * g + 8 * i);
    }
}

void read_iq2_xs(const uint8_t* source, GridBlock& out) {
    for (size_t i = 0; i < 32; ++i) {
        const unsigned word = word16(source + 2 + 2 * i);
        put_iq2(kIQ2XSGrid.entries[word & 511], eight_signs(word >> 9), out.values + 8 * i);
    }
    read_nibble_scales(source + 66, out);
}

void read_iq2_s(const uint8_t* source, GridBlock& out) {
    for (size_t i = 0; i < 32; ++i) {
        const unsigned high = source[66 + i / 4] >> (2 * (i % 4)) & 3u;
        put_iq2(kIQ2SGrid.entries[source[2 + i] | high << 8], source[34 + i], out.values + 8 * i);
    }
    read_nibble_scales(source + 74, out);
}

void read_iq3_xxs(const uint8_t* source, GridBlock& out) {
    for (size_t g = 0; g < 8; ++g) {
        const uint32_t rest = word32(source + 66 + 4 * g);
        out.scales[2 * g] = out.scales[2 * g + 1] = odd_scale(rest >> 28);
        for (size_t i = 0; i < 8; ++i) {
            const unsigned entry = kIQ3XXSGrid.entries[source[2 + 8 * g + i]];
            const unsigned signs = eight_signs(rest >> (7 * (i / 2))) >> (4 * (i % 2));
            put_iq3<Quant::IQ3_XXS>(entry, signs, out.values + 32 * g + 4 * i);
        }
    }
}

void read_iq3_s(const uint8_t* source, GridBlock& out) {
    for (size_t i = 0; i < 64; ++i) {
        const unsigned high = source[66 + i / 8] >> (i % 8) & 1u;
        const unsigned signs = static_cast<unsigned>(source[74 + i / 2]) >> (4 * (i % 2));
        put_iq3<Quant::IQ3_S>(kIQ3SGrid.entries[source[2 + i] | high << 8], signs, out.values + 4 * i);
    }
    for (size_t i = 0; i < 16; ++i) out.scales[i] = odd_scale(source[106 + i / 4] >> (4 * (i / 2 % 2)));
}

void read_iq1_s(const uint8_t* source, GridBlock& out) {
    for (size_t g = 0; g < 8; ++g) {
        const unsigned word = word16(source + 34 + 2 * g);
        out.scales[2 * g] = out.scales[2 * g + 1] = odd_scale(word >> 12 & 7);
        for (size_t i = 0; i < 4; ++i)
            put_iq1(source[2 + 4 * g + i] | (word >> (3 * i) & 7) << 8, word >> 15, out.values + 32 * g + 8 * i);
    }
}

void read_iq1_m(const uint8_t* source, GridBlock& out) {
    unsigned d = 0;
    for (size_t i = 0; i < 4; ++i) d |= word16(source + 48 + 2 * i) >> 12 << (4 * i);
    out.d[0] = static_cast<uint8_t>(d);
    out.d[1] = static_cast<uint8_t>(d >> 8);
    for (size_t i = 0; i < 16; ++i) out.scales[i] = odd_scale(word16(source + 48 + i / 4 * 2) >> (3 * (i % 4)) & 7);
    for (size_t i = 0; i < 32; ++i) {
        const unsigned high = source[32 + i / 2] >> (4 * (i % 2));
        put_iq1(source[i] | (high & 7) << 8, high & 8, out.values + 8 * i);
    }
}

}  // namespace

void read_grid_block(Quant quant, const uint8_t* source, GridBlock& out) {
    std::memcpy(out.d, source, 2);
    switch (quant) {
        case Quant::IQ2_XXS:
            return read_iq2_xxs(source, out);
        case Quant::IQ2_XS:
            return read_iq2_xs(source, out);
        case Quant::IQ2_S:
            return read_iq2_s(source, out);
        case Quant::IQ3_XXS:
            return read_iq3_xxs(source, out);
        case Quant::IQ3_S:
            return read_iq3_s(source, out);
        case Quant::IQ1_S:
            return read_iq1_s(source, out);
        default:
            return read_iq1_m(source, out);
    }
}

}  // namespace ktqueue
