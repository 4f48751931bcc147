#include "model/feed_forward.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "model/rms_norm.h"
#include "model/rows.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

constexpr size_t kTokensAtOnce = 2048;  // limits the workspace

}  // namespace

void check(const FeedForwardLayer& layer, size_t hidden) {
    require(is_norm(layer.norm, hidden), "a norm");
    for (const auto* norm :
         {&layer.router_norm, &layer.experts_norm, &layer.shared_out_norm, &layer.experts_out_norm, &layer.out_norm})
        require(norm->empty() || is_norm(*norm, hidden), "a norm of a part");
    require(layer.mlp ? layer.mlp->hidden() == hidden && layer.mlp->experts() == 1 : layer.experts != nullptr,
            "the MLP");
    require(!layer.shared_gate || (layer.mlp && layer.router_norm.empty() && fits(layer.shared_gate, 1, hidden)),
            "the shared expert's gate");
    if (layer.experts) {
        require(layer.experts->hidden() == hidden, "the experts");
        require(fits(layer.router, layer.experts->experts(), hidden), "the router");
        check(layer.routing, layer.experts->experts());
    }
}

void FeedForward::run(const FeedForwardLayer& layer, float* x, size_t count, uint64_t* uses, uint16_t* choices) {
    for (size_t first = 0; first < count; first += kTokensAtOnce)
        run_piece(layer, x + first * hidden_, std::min(kTokensAtOnce, count - first), uses,
                  choices ? choices + first * layer.routing.chosen : nullptr);
}

void FeedForward::run_piece(const FeedForwardLayer& layer, float* x, size_t count, uint64_t* uses, uint16_t* choices) {
    const size_t hidden = hidden_;
    normalise(layer.router_norm.empty() ? layer.norm : layer.router_norm, x, count);
    LinearCall calls[2];
    size_t used = 0;
    if (layer.experts) {
        const size_t experts = layer.experts->experts();
        calls[used++] = {layer.router, grown(router_logits_, count * experts), experts};
    }
    if (layer.shared_gate) calls[used++] = {layer.shared_gate, grown(shares_, count), 1};
    run_linears(calls, used, normed_.data(), hidden, count);

    const bool both = layer.experts && layer.mlp;
    float* out = grown(out_, count * hidden);
    float* shared = both ? grown(shared_, count * hidden) : out;
    const bool same_input = layer.router_norm.empty() && layer.experts_norm.empty();
    if (layer.experts) {
        if (!same_input) normalise(layer.experts_norm.empty() ? layer.norm : layer.experts_norm, x, count);
        run_experts(layer, count, out, uses, choices);
    }
    if (layer.mlp) {
        if (!same_input) normalise(layer.norm, x, count);
        run_mlp(layer, count, shared);
    }
    for_tokens(count, hidden, [&](size_t t) {
        float *row = out + t * hidden, *shared_row = shared + t * hidden;
        if (layer.experts) normalise_row(layer.experts_out_norm, row, hidden, epsilon_, row);
        if (both) {
            normalise_row(layer.shared_out_norm, shared_row, hidden, epsilon_, shared_row);
            add(row, shared_row, hidden);
        }
        normalise_row(layer.out_norm, row, hidden, epsilon_, row);
        add(x + t * hidden, row, hidden);
        scale(x + t * hidden, hidden, layer.out_scale);
    });
}

void FeedForward::normalise(const std::vector<float>& norm, const float* x, size_t count) {
    float* normed = grown(normed_, count * hidden_);
    for_tokens(count, hidden_,
               [&](size_t t) { normalise_row(norm, x + t * hidden_, hidden_, epsilon_, normed + t * hidden_); });
}

void FeedForward::run_experts(const FeedForwardLayer& layer, size_t count, float* out, uint64_t* uses,
                              uint16_t* choices) {
    const size_t chosen = layer.routing.chosen, experts = layer.experts->experts();
    int64_t* ids = grown(ids_, count * chosen);
    float* weights = grown(routing_, count * chosen);
    float* scores = grown(scores_, count * experts);
    for_tokens(count, 8 * experts, [&](size_t t) {
        route(router_logits_.data() + t * experts, experts, layer.routing, scores + t * experts, ids + t * chosen,
              weights + t * chosen);
    });
    used_.assign(experts, 0);
    for (size_t i = 0; i < count * chosen; ++i) {
        used_[static_cast<size_t>(ids[i])] = 1;
        ++uses[ids[i]];
    }
    if (choices) std::copy(ids, ids + count * chosen, choices);
    const auto used = static_cast<uint64_t>(std::count(used_.begin(), used_.end(), uint8_t{1}));
    const auto began = std::chrono::steady_clock::now();
    layer.experts->forward(normed_.data(), ids, weights, count, chosen, out);
    const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - began;
    ++totals_.layers_run;
    totals_.experts_used += used;
    totals_.bytes += used * (layer.experts->bytes() / experts);
    totals_.nanoseconds += static_cast<uint64_t>(took.count());
}

void FeedForward::run_mlp(const FeedForwardLayer& layer, size_t count, float* out) {
    const int64_t* zeros = grown(zeros_, count);
    float* shares = grown(shares_, count);
    for (size_t t = 0; t < count; ++t) shares[t] = layer.shared_gate ? 1.0f / (1.0f + std::exp(-shares[t])) : 1.0f;
    layer.mlp->forward(normed_.data(), zeros, shares, count, 1, out);
}

}  // namespace ktqueue
