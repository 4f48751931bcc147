// The routed experts of one layer: out[t] = sum over slots of weight * expert(x[t]), where
// expert(x) = down(activation(gate(x)) * up(x)). Weights are packed when the layer is made.
// Knows nothing of Python or of how tokens were routed.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "experts/expert_panels.h"
#include "kernels/prepared_rows.h"

namespace ktqueue {

class ThreadPool;

// One matrix of every expert: `data[e]` points to rows * row_bytes(quant, columns) bytes, any alignment.
struct ExpertMatrices {
    Quant quant;
    size_t rows;
    size_t columns;
    std::vector<const uint8_t*> data;
    std::vector<float> bias;  // [experts, rows], or empty
};

struct ExpertOptions {
    Activation activation = Activation::Silu;
    float alpha = 0, limit = 0;  // of SwigluClamped
    Precision precision = Precision::Fast;
};

class ExpertLayer {
  public:
    // gate, up: [intermediate, hidden]; down: [hidden, intermediate]. Packs them with the shared pool; `data` is not
    // needed afterwards. Throws std::invalid_argument if shapes disagree or a scale is not finite.
    ExpertLayer(ExpertMatrices gate, ExpertMatrices up, ExpertMatrices down, const ExpertOptions& options,
                const KernelTable& kernels);

    // x, out: [tokens, hidden]; ids, weights: [tokens, slots]. An id of -1 is no expert: its slot adds nothing, and a
    // token with no other id gets zeros. Throws std::invalid_argument, before anything is written, if an id is not in
    // -1..experts-1 or there are more than 64 slots. Results do not depend on the number of threads or, but for
    // whether an expert has rows enough for tiles (see kernels/kernel_table.h), on the other tokens.
    void forward(const float* x, const int64_t* ids, const float* weights, size_t tokens, size_t slots,
                 float* out) const;

    // Fetches into the caches what forward() would read first for few tokens that use `experts`, rising: each thread what
    // it would read itself, at most `most_bytes`, until `stop()`, which all threads ask all the time.
    void prefetch(std::span<const size_t> experts, size_t most_bytes, const std::function<bool()>& stop) const;

    // For tests: of each thread the cache lines that prefetch() would fetch, in order. Fetches none.
    std::vector<std::vector<const uint8_t*>> prefetch_lines(std::span<const size_t> experts, size_t most_bytes,
                                                            const std::function<bool()>& stop) const;

    // The packed memory of one expert, in order: (panel p of gate, panel p of up) for every p, then every panel of
    // down, each as formats/panel_layout.h says. Two ranges, or more where panels are divided among NUMA nodes; they last as
    // long as the layer. Throws std::invalid_argument.
    std::vector<std::span<const uint8_t>> ranges(size_t expert) const;

    size_t experts() const { return gate_.data.size(); }
    size_t hidden() const { return gate_.columns; }
    size_t intermediate() const { return gate_.rows; }
    size_t bytes() const { return mid_panels_.bytes() + hidden_panels_.bytes(); }  // of packed weights
    const char* isa() const { return kernels_.isa; }

  private:
    struct Workspace;
    struct Span;
    struct Forms;
    struct Jobs {  // one after the other
        PanelJob mid, hidden;
    };

    void pack();
    void forward_some(const float* x, const int64_t* ids, const float* weights, size_t tokens, size_t slots, float* out,
                      Workspace& space) const;
    Jobs jobs(const ThreadPool& pool, size_t spans, bool tiles) const;
    template <class Fetch>
    void walk(ThreadPool& pool, std::span<const size_t> experts, size_t most_bytes, const std::function<bool()>& stop,
              const Fetch& fetch) const;
    void sort_by_expert(const int64_t* ids, size_t pairs, Workspace& space) const;
    void prepare_rows(const float* x, const int64_t* ids, size_t tokens, size_t slots, Workspace& space) const;
    void gate_up(const Span& span, size_t first, size_t last, const Workspace& space) const;
    void down(const Span& span, size_t first, size_t last, const Workspace& space) const;
    void merge(const float* weights, size_t first, size_t last, float* out, const Workspace& space) const;

    ExpertMatrices gate_, up_, down_;
    ExpertOptions options_;
    const KernelTable& kernels_;
    size_t gate_panel_, up_panel_;  // bytes
    float mid_unit_, down_unit_;    // tile_unit() of gate and up, of down
    ExpertPanels mid_panels_;       // over the intermediate size: each a panel of gate, then one of up
    ExpertPanels hidden_panels_;    // over the hidden size: of down
};

}  // namespace ktqueue
