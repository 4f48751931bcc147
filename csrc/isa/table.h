// Fills the table of one instruction set from the lanes and vectors that its translation unit has included. Include it
// after a lanes and a vector header; internal linkage.
#pragma once

#include "kernels/attention_kernels.h"
#include "kernels/delta_kernels.h"
#include "kernels/expert_kernels.h"
#include "kernels/panel_kernels.h"
#include "kernels/row_kernels.h"

namespace ktqueue {
namespace {

constexpr KernelTable make_table(const char* isa) {
    return {
        isa,
        {exact_panels<PanelF32>,
         exact_panels<PanelF16>,
         exact_panels<PanelBF16>,
         dot_panels<PanelQ4_0>,
         dot_panels<PanelQ8_0>,
         dot_panels<PanelQ2_K>,
         dot_panels<PanelQ3_K>,
         dot_panels<PanelQ4_K>,
         dot_panels<PanelQ5_K>,
         dot_panels<PanelQ6_K>,
         dot_panels<PanelIQ4_NL>,
         dot_panels<PanelIQ4_XS>,
         dot_panels<PanelMXFP4>,
         dot_panels<PanelIQ2>,
         dot_panels<PanelIQ2>,
         dot_panels<PanelIQ2>,
         dot_panels<PanelIQ3<Quant::IQ3_XXS>>,
         dot_panels<PanelIQ3<Quant::IQ3_S>>,
         dot_panels<PanelIQ1>,
         dot_panels<PanelIQ1>,
         dot_panels<PanelNVFP4>,
         dot_panels<PanelQ4_1>,
         dot_panels<PanelQ5_1>,
         dot_panels<PanelUINT4>,
         exact_panels<PanelFP8>,
         dot_panels<PanelNVFP4>},
        {exact_panels<PanelF32>,
         exact_panels<PanelF16>,
         exact_panels<PanelBF16>,
         exact_panels<PanelQ4_0>,
         exact_panels<PanelQ8_0>,
         exact_panels<PanelQ2_K>,
         exact_panels<PanelQ3_K>,
         exact_panels<PanelQ4_K>,
         exact_panels<PanelQ5_K>,
         exact_panels<PanelQ6_K>,
         exact_panels<PanelIQ4_NL>,
         exact_panels<PanelIQ4_XS>,
         exact_panels<PanelMXFP4>,
         exact_panels<PanelIQ2>,
         exact_panels<PanelIQ2>,
         exact_panels<PanelIQ2>,
         exact_panels<PanelIQ3<Quant::IQ3_XXS>>,
         exact_panels<PanelIQ3<Quant::IQ3_S>>,
         exact_panels<PanelIQ1>,
         exact_panels<PanelIQ1>,
         exact_panels<PanelNVFP4>,
         exact_panels<PanelQ4_1>,
         exact_panels<PanelQ5_1>,
         exact_panels<PanelUINT4>,
         exact_panels<PanelFP8>,
         exact_panels<PanelNVFP4>},
        {},
        {},
        quantize,
        bf16_row,
        nullptr,
        merge,
        {gate_silu, gate_gelu, gate_gelu_tanh, gate_swiglu_clamped},
        {activate_slabs<gate_silu>, activate_slabs<gate_gelu>, activate_slabs<gate_gelu_tanh>,
         activate_slabs<gate_swiglu_clamped>},
        {},
        attention,
        index_scores,
        convolve,
        delta_rule,
        multiply_by_sigmoid,
    };
}

}  // namespace
}  // namespace ktqueue
