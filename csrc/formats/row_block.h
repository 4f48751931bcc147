// A block or superblock of one row of any block format, read as plain codes: what formats/pack.cpp writes to the planes
// and formats/dequantize.cpp converts.
#pragma once

#include "formats/panel_layout.h"

namespace ktqueue {

// `slabs` * 32 codes, and scales as formats/panel_layout.h stores them.
struct RowBlock {
    uint8_t codes[kSuperblock];
    uint8_t scales[32];  // up to four bytes a slab
    uint8_t minimums[kSlabs];
    uint8_t d[2], dmin[2];
    float factor, rest;  // of NVFP4 and FP4
};

// Whether a half is neither infinite nor NaN.
bool finite_half(const uint8_t* half);

// Reads so many slabs of a row in a block format: whole blocks, at most a superblock. Throws std::invalid_argument if
// blocks of FP4 have different factors.
void read_block(Quant quant, const uint8_t* source, size_t slabs, RowBlock& out);

bool block_is_finite(Quant quant, const RowBlock& block, size_t slabs);

// An upper bound of the magnitude of weights and of the terms they are computed from. Scales count as large as their
// bits allow, which the largest scale of a superblock nearly is.
float block_bound(Quant quant, const RowBlock& block, size_t slabs);

}  // namespace ktqueue
