// Blocks of the IQ formats that choose groups of weights from a grid, read as plain numbers.
#pragma once

#include "formats/quant_format.h"

namespace ktqueue {

// 256 weights: weight i is d * grid_unit() * scales[i / 16] * values[i]. Every such product is exact in a float.
struct GridBlock {
    int8_t values[256];  // never 0
    uint8_t scales[16];  // odd: 1 to 15, or to 31
    uint8_t d[2];        // a half
};

constexpr bool has_grid(Quant quant) {
    return quant >= Quant::IQ2_XXS && quant <= Quant::IQ1_M;
}

// The step of scales times values; a power of two.
constexpr float grid_unit(Quant quant) {
    return quant == Quant::IQ3_S ? 1.0f : quant == Quant::IQ3_XXS ? 0.25f : 0.125f;
}

// Reads one block of a format that has a grid.
void read_grid_block(Quant quant, const uint8_t* source, GridBlock& out);

}  // namespace ktqueue
