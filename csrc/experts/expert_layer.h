// The routed experts of one layer: out[t] = sum over slots of weight * expert(x[t]), where expert(x) =
// down(activation(gate(x)) * up(x)). Weights are packed by the constructor. Knows no Python and no routing.
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
    float alpha = 0, limit = 0;  // of SwigluClamped, and SiluLimited's limit
    Precision precision = Precision::Fast;
    bool weighted_input = false;  // a slot adds expert(weight * x) instead of weight * expert(x)
};

class ExpertLayer {
  public:
    // gate, up: [intermediate, hidden]; down: [hidden, intermediate]. Packs them with the shared pool; `data` is not
    // needed afterwards. Throws std::invalid_argument if shapes disagree or a scale is not finite.
    ExpertLayer(ExpertMatrices gate, ExpertMatrices up, ExpertMatrices down, const ExpertOptions& options,
                const KernelTable& kernels);

    // x, out: [tokens, hidden]; ids, weights: [tokens, slots]. An id of -1 means no expert: the slot adds nothing, and
    // a token with only such slots gets zeros, or without `zeros` keeps its row of `out`. Throws std::invalid_argument,
    // before anything is written, if an id is not in -1..experts-1 or there are more than 64 slots. A token's result
    // does not depend on the number of threads. It depends on the other tokens only by whether an expert has enough
    // rows for tiles (see kernels/kernel_table.h).
    void forward(const float* x, const int64_t* ids, const float* weights, size_t tokens, size_t slots, float* out,
                 bool zeros = true) const;

    // Fetches into the caches the weights that forward() would read first for few tokens that use `experts` (rising).
    // Each thread fetches what it would read itself, at most `most_bytes`, until `stop()` returns true; all threads
    // call it often.
    void prefetch(std::span<const size_t> experts, size_t most_bytes, const std::function<bool()>& stop) const;

    // For tests: the cache lines that prefetch() would fetch, in order, for each thread. Fetches nothing.
    std::vector<std::vector<const uint8_t*>> prefetch_lines(std::span<const size_t> experts, size_t most_bytes,
                                                            const std::function<bool()>& stop) const;

    // The packed memory of one expert, in order: (panel p of gate, panel p of up) for every p, then every panel of
    // down, in the layout of formats/panel_layout.h. Two ranges, or more if panels are divided among NUMA nodes; valid
    // as long as the layer. Throws std::invalid_argument if there is no such expert.
    std::vector<std::span<const uint8_t>> ranges(size_t expert) const;

    size_t experts() const { return gate_.data.size(); }
    size_t hidden() const { return gate_.columns; }
    size_t intermediate() const { return gate_.rows; }
    size_t bytes() const { return gate_up_panels_.bytes() + down_panels_.bytes(); }  // of packed weights
    const char* isa() const { return kernels_.isa; }

  private:
    struct Workspace;
    struct Span;
    struct Forms;
    struct Jobs {  // one after the other
        PanelJob gate_up, down;
    };

    void pack();
    void forward_some(const float* x, const int64_t* ids, const float* weights, size_t tokens, size_t slots, float* out,
                      bool zeros, Workspace& space) const;
    Jobs jobs(const ThreadPool& pool, size_t spans, bool tiles) const;
    template <class Fetch>
    void walk(ThreadPool& pool, std::span<const size_t> experts, size_t most_bytes, const std::function<bool()>& stop,
              const Fetch& fetch) const;
    void sort_by_expert(const int64_t* ids, size_t pairs, Workspace& space) const;
    void prepare_rows(const float* x, const int64_t* ids, size_t tokens, size_t slots, size_t pairs,
                      Workspace& space) const;
    void gate_up(const Span& span, size_t first, size_t last, const Workspace& space) const;
    void down(const Span& span, size_t first, size_t last, const Workspace& space) const;
    void merge(const float* weights, size_t first, size_t last, float* out, bool zeros, const Workspace& space) const;

    ExpertMatrices gate_, up_, down_;
    ExpertOptions options_;
    const KernelTable& kernels_;
    size_t gate_panel_, up_panel_;    // bytes
    float gate_up_unit_, down_unit_;  // tile_unit() of gate and up together, and of down
    ExpertPanels gate_up_panels_;     // along the intermediate size: each a panel of gate, then one of up
    ExpertPanels down_panels_;        // along the hidden size: panels of down
};

}  // namespace ktqueue
