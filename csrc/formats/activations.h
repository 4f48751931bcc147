// Activations in the form that kernels of block formats need: int8 with a scale per 32 columns, prepared once per row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/panel_layout.h"

namespace ktqueue {

// 32 columns of one row: x[i] = scale * q[i] up to rounding, scale = max |x| / 127. A slab that contains an infinity or
// a NaN has the scale NaN. That spoils the results of this row and no other.
struct ActivationSlab {
    int8_t q[kSlab];
    float scale;
    // What makes unsigned codes signed, by half slab (both equal for formats with one scale per slab, see
    // `ActivationKind`): the integer -offset * sum(q) or, for formats with minimums, the float sum of x. With `words`
    // that integer is also in the upper 16 bits.
    union {
        int32_t correction[2];
        float total[2];
    };
    uint32_t padding;
};
static_assert(sizeof(ActivationSlab) == 48);

// The corrections that a weight format needs. Formats of one kind share prepared rows.
struct ActivationKind {
    int32_t offset;  // added to the codes; 0: the format has minimums instead
    bool halves;     // a correction for each half slab; else both are that of the whole slab
    bool words;      // one multiplication applies scales and minimums: see `WordFactors`

    bool operator==(const ActivationKind&) const = default;
};

constexpr ActivationKind activation_kind(Quant quant) {
    switch (panel_format(quant)) {
        case Quant::Q4_0:
            return {8, false, false};
        case Quant::Q4_K:
            return {8, false, true};
        case Quant::Q8_0:
        case Quant::IQ4_NL:
        case Quant::IQ4_XS:
            return {128, false, false};
        case Quant::MXFP4:
            return {12, false, false};
        case Quant::Q6_K:
            return {32, true, false};
        case Quant::Q3_K:
            return {4, true, false};
        case Quant::IQ3_XXS:
            return {31, false, false};
        case Quant::IQ3_S:
            return {15, false, false};
        case Quant::IQ2_S:
            return {43, true, false};
        case Quant::IQ1_M:
            return {9, true, false};
        case Quant::NVFP4:
            return {12, true, false};
        case Quant::Q2_K:
            return {0, true, false};
        default:
            return {0, false, false};
    }
}

}  // namespace ktqueue
