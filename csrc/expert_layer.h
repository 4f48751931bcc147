// The routed experts of one layer: out[t] = sum over slots of weight * down(silu(gate(x[t])) * up(x[t])).
// Weights stay where the caller has them (a mapped file); knows nothing of Python or of how tokens were routed.
#pragma once

#include <vector>

#include "kernel_table.h"

namespace ktqueue {

// One matrix of every expert: `data[e]` points to rows * row_bytes(quant, columns) bytes, any alignment.
struct ExpertMatrices {
    Quant quant;
    size_t rows;
    size_t columns;
    std::vector<const uint8_t*> data;
};

class ExpertLayer {
  public:
    // gate, up: [intermediate, hidden]; down: [hidden, intermediate]. Throws std::invalid_argument if shapes disagree.
    ExpertLayer(ExpertMatrices gate, ExpertMatrices up, ExpertMatrices down, const KernelTable& kernels);

    // x, out: [tokens, hidden]; ids, weights: [tokens, slots]. Throws std::invalid_argument, before anything is
    // written, if an id is not in 0..experts-1. Results do not depend on the number of threads or on the other tokens.
    void forward(const float* x, const int64_t* ids, const float* weights, size_t tokens, size_t slots,
                 float* out) const;

    size_t experts() const { return gate_.data.size(); }
    size_t hidden() const { return gate_.columns; }
    size_t intermediate() const { return gate_.rows; }
    const char* isa() const { return kernels_.isa; }

  private:
    struct Workspace;
    struct Span;

    void forward_some(const float* x, const int64_t* ids, const float* weights, size_t tokens, size_t slots, float* out,
                      Workspace& space) const;
    void sort_by_expert(const int64_t* ids, size_t pairs, Workspace& space) const;
    void gate_up(const Span& span, size_t block, Workspace& space) const;
    void down(const Span& span, size_t block, Workspace& space) const;

    ExpertMatrices gate_, up_, down_;
    const KernelTable& kernels_;
    size_t gate_block_rows_, down_block_rows_;
};

}  // namespace ktqueue
