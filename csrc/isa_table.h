// The table of one instruction set, from the decoders and vectors that its translation unit has chosen.
// Included only by such a translation unit, after a quant_decode header; internal linkage.
#pragma once

#include "attention_kernels.h"
#include "expert_kernels.h"

namespace ktqueue {
namespace {

constexpr KernelTable make_table(const char* isa) {
    return {
        isa,
        {matrix<DecodeF32>, matrix<DecodeF16>, matrix<DecodeBF16>, matrix<DecodeQ4_0>, matrix<DecodeQ8_0>,
         matrix<DecodeQ2_K>, matrix<DecodeQ3_K>, matrix<DecodeQ4_K>, matrix<DecodeQ5_K>, matrix<DecodeQ6_K>,
         matrix<DecodeIQ4_NL>, matrix<DecodeIQ4_XS>, matrix<DecodeMXFP4>},
        {dequantize<DecodeF32>, dequantize<DecodeF16>, dequantize<DecodeBF16>, dequantize<DecodeQ4_0>,
         dequantize<DecodeQ8_0>, dequantize<DecodeQ2_K>, dequantize<DecodeQ3_K>, dequantize<DecodeQ4_K>,
         dequantize<DecodeQ5_K>, dequantize<DecodeQ6_K>, dequantize<DecodeIQ4_NL>, dequantize<DecodeIQ4_XS>,
         dequantize<DecodeMXFP4>},
        silu_gate,
        attention,
    };
}

}  // namespace
}  // namespace ktqueue
