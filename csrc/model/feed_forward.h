// The feed-forward part of a layer: a dense MLP, routed experts, or both side by side. Knows no attention.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "experts/expert_layer.h"
#include "model/linear.h"
#include "model/router.h"

namespace ktqueue {

// Computes x += norm_out(mlp(norm(x)) + experts(norm(x))), then x *= out_scale. Norms are empty, or as in rms_norm.h.
// Matrices belong to the caller.
struct FeedForwardLayer {
    std::vector<float> norm;
    std::vector<float> router_norm, experts_norm;  // of the input of either, if it is not `norm`
    // The dense MLP, or the shared expert of a layer with routed experts: a layer of one expert. Null if there is none.
    const ExpertLayer* mlp = nullptr;
    const Linear* shared_gate = nullptr;  // one row; the shared expert's weight is sigmoid(shared_gate(x)); null: 1
    const Linear* router = nullptr;       // [experts, hidden]
    const ExpertLayer* experts = nullptr;
    Routing routing;                                       // of a layer with routed experts
    std::vector<float> shared_out_norm, experts_out_norm;  // of what the shared expert and the routed ones return
    std::vector<float> out_norm;                           // of what is added to x
    float out_scale = 1;
};

// Throws std::invalid_argument if the parts do not fit each other.
void check(const FeedForwardLayer& layer, size_t hidden);

// Work of routed experts since the start. experts_used: different experts of each run of a layer, summed; bytes: of their
// packed weights; nanoseconds: of wall time.
struct ExpertTotals {
    std::atomic<uint64_t> layers_run{0}, experts_used{0}, bytes{0}, nanoseconds{0};
};

class FeedForward {
  public:
    FeedForward(size_t hidden, float epsilon) : hidden_(hidden), epsilon_(epsilon) {}

    // Computes `layer` for x[count, hidden] in place, and adds each use of a routed expert to uses[experts]. The experts
    // of each token are written to choices[count, chosen], unless that is null. One caller at a time.
    void run(const FeedForwardLayer& layer, float* x, size_t count, uint64_t* uses, uint16_t* choices);

    const ExpertTotals& totals() const { return totals_; }

  private:
    void run_piece(const FeedForwardLayer& layer, float* x, size_t count, uint64_t* uses, uint16_t* choices);
    void run_experts(const FeedForwardLayer& layer, size_t count, float* out, uint64_t* uses, uint16_t* choices);
    void run_mlp(const FeedForwardLayer& layer, size_t count, float* out);
    void normalise(const std::vector<float>& norm, const float* x, size_t count);

    const size_t hidden_;
    const float epsilon_;
    std::vector<float> normed_, out_, router_logits_, scores_, routing_, shares_, shared_;
    std::vector<int64_t> ids_, zeros_;
    std::vector<uint8_t> used_;  // [experts]
    ExpertTotals totals_;
};

}  // namespace ktqueue
