// activation(gate) * up and its rounding in one go, for many rows: what lies between gate, up and down.
// Included only by translation units of one instruction set, after kernels/gate_kernels.h and kernels/row_kernels.h; internal linkage.
//
// Each of the two is one long chain of operations. Nothing is called between rows here, and first all rows pass through
// the one, then through the other: short enough loops that the processor works at several rows at once. The operations
// are those of the two kernels alone: results are equal bit for bit.
#pragma once

#include <algorithm>

#include "kernels/gate_kernels.h"
#include "kernels/row_kernels.h"

namespace ktqueue {
namespace {

constexpr size_t kMidRows = 16;  // at once

// write(mid[32], out) for each slab of each row, which is `bytes` long there.
template <GateKernel Gate, class Write>
inline void mid_rows(const MidTask& task, size_t bytes, Write write) {
    constexpr size_t kPanels = kSlab / kPanelRows;
    alignas(64) float mid[kMidRows][kSlab];
    for (size_t p = 0; p < task.panels; p += kPanels)
        for (size_t first = 0; first < task.tokens; first += kMidRows) {
            const size_t rows = std::min(kMidRows, task.tokens - first);
            const float* row = task.both + first * task.stride + p * 2 * kPanelRows;
            uint8_t* out = task.out + first * task.out_stride + p / kPanels * bytes;
            for (size_t t = 0; t < rows; ++t, row += task.stride)
                Gate({row, row + kPanelRows, mid[t], kPanels, task.alpha, task.limit});
            for (size_t t = 0; t < rows; ++t, out += task.out_stride) write(mid[t], out);
        }
}

template <GateKernel Gate>
void mid_slabs(const MidTask& task) {
    mid_rows<Gate>(task, sizeof(ActivationSlab), [&](const float* mid, uint8_t* out) {
        quantize_slab(mid, task.kind, *reinterpret_cast<ActivationSlab*>(out));
    });
}

}  // namespace
}  // namespace ktqueue
