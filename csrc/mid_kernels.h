// activation(gate) * up and its rounding to int8 in one go, for many rows: what lies between gate, up and down.
// Included only by translation units of one instruction set, after gate_kernels.h and row_kernels.h; internal linkage.
//
// Each of the two is one long chain of operations. Nothing is called between rows here, and first all rows pass through
// the one, then through the other: short enough loops that the processor works at several rows at once. The operations
// are those of the two kernels alone: results are equal bit for bit.
#pragma once

#include <algorithm>
#include <cstring>

#include "gate_kernels.h"
#include "row_kernels.h"

namespace ktqueue {
namespace {

constexpr size_t kMidRows = 16;  // at once

template <GateKernel Gate>
void mid_slabs(const MidTask& task) {
    constexpr size_t kBlocks = kSlab / kPanelRows;
    alignas(64) float mid[kMidRows][kSlab];
    for (size_t b = 0; b < task.panels; b += kBlocks) {
        const size_t blocks = std::min(kBlocks, task.panels - b);
        if (blocks < kBlocks) std::memset(mid, 0, sizeof(mid));
        for (size_t first = 0; first < task.tokens; first += kMidRows) {
            const size_t rows = std::min(kMidRows, task.tokens - first);
            const float* row = task.both + first * task.stride + b * 2 * kPanelRows;
            uint8_t* out = task.out + first * task.out_stride + b / kBlocks * sizeof(ActivationSlab);
            for (size_t t = 0; t < rows; ++t, row += task.stride)
                if (blocks == kBlocks)
                    Gate({row, row + kPanelRows, mid[t], kBlocks, task.alpha, task.limit});
                else
                    Gate({row, row + kPanelRows, mid[t], 1, task.alpha, task.limit});
            for (size_t t = 0; t < rows; ++t, out += task.out_stride)
                quantize_slab(mid[t], task.kind, *reinterpret_cast<ActivationSlab*>(out));
        }
    }
}

}  // namespace
}  // namespace ktqueue
