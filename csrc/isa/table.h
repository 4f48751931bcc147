// Fills the table of one instruction set from the lanes and vectors that its translation unit has included. Include it
// after a lanes and a vector header; internal linkage.
#pragma once

#include <utility>

#include "kernels/attention_kernels.h"
#include "kernels/delta_kernels.h"
#include "kernels/expert_kernels.h"
#include "kernels/panel_kernels.h"
#include "kernels/row_kernels.h"

namespace ktqueue {
namespace {

template <Quant kQuant>
constexpr PanelKernel dot_kernel() {
    using Format = Panel<panel_format(kQuant)>;
    if constexpr (takes_floats(kQuant))
        return exact_panels<Format>;
    else
        return dot_panels<Format>;
}

template <size_t... I>
constexpr KernelTable make_table(const char* isa, std::index_sequence<I...>) {
    return {
        isa,
        {dot_kernel<static_cast<Quant>(I)>()...},
        {exact_panels<Panel<panel_format(static_cast<Quant>(I))>>...},
        {},
        {},
        quantize,
        bf16_row,
        nullptr,
        merge,
        {gate_silu, gate_gelu, gate_gelu_tanh, gate_swiglu_clamped, gate_silu_limited},
        {activate_slabs<gate_silu>, activate_slabs<gate_gelu>, activate_slabs<gate_gelu_tanh>,
         activate_slabs<gate_swiglu_clamped>, activate_slabs<gate_silu_limited>},
        {},
        attention,
        index_scores,
        convolve,
        delta_rule,
        multiply_by_sigmoid,
    };
}

constexpr KernelTable make_table(const char* isa) {
    return make_table(isa, std::make_index_sequence<kQuantCount>());
}

}  // namespace
}  // namespace ktqueue
