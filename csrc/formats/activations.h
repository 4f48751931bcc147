// Activations as the kernels for block formats want them: int8 with a scale for each 32, prepared once for each row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/panel_layout.h"

namespace ktqueue {

// 32 columns of one row: x[i] = scale * q[i] up to rounding, scale = max |x| / 127. A slab with an infinity or a NaN
// has the scale NaN, which poisons that row's results and no other's.
struct ActivationSlab {
    int8_t q[kSlab];
    float scale;
    // What makes unsigned codes signed, by half slab (both the same sum for formats with one scale a slab: see
    // `ActivationKind`): an integer -offset * sum(q), or the float sum of x for formats with minimums. For `words` that
    // integer twice, in the upper 16 bits too.
    union {
        int32_t correction[2];
        float total[2];
    };
    uint32_t padding;
};
static_assert(sizeof(ActivationSlab) == 48);

// Which corrections a weight format needs. Formats of one kind share prepared rows.
struct ActivationKind {
    int32_t offset;  // of the codes; 0: the format has minimums instead
    bool halves;     // corrections for each half slab instead of the whole one (then both are that of the whole)
    bool words;      // minimums meet the correction itself, beside the products: see `WordFactors`

    bool operator==(const ActivationKind&) const = default;
};

constexpr ActivationKind activation_kind(Quant quant) {
    switch (quant) {
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
        case Quant::Q2_K:
            return {0, true, false};
        default:
            return {0, false, false};
    }
}

}  // namespace ktqueue
