#include "model/decoder.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "model/rms_norm.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

using std::to_string;

constexpr size_t kTokensAtOnce = 2048;  // of the feed-forward part: limits the workspace

void require(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(std::string(what) + " does not fit the decoder");
}

bool fits(const Linear* linear, size_t rows, size_t columns) {
    return linear && linear->rows() == rows && linear->columns() == columns;
}

bool is_norm(const std::vector<float>& norm, size_t hidden) {
    return norm.size() == hidden || norm.size() == 2 * hidden;
}

void scale(float* values, size_t count, float factor) {
    if (factor == 1) return;
    for (size_t i = 0; i < count; ++i) values[i] *= factor;
}

// Softly limits values to -limit .. limit.
void cap(float* values, size_t count, float limit) {
    if (limit == 0) return;
    for (size_t i = 0; i < count; ++i) values[i] = limit * std::tanh(values[i] / limit);
}

}  // namespace

Decoder::Decoder(const DecoderShape& shape, const StoredMatrix& embedding, std::vector<float> norm, const Linear& head,
                 const KernelTable& kernels)
    : shape_(shape), embedding_(embedding), norm_(std::move(norm)), head_(head), kernels_(kernels) {
    ktqueue::check(shape.attention);
    require(embedding.columns == shape.hidden, "the embedding");
    require(is_norm(norm_, shape.hidden), "the last norm");
    require(head.columns() == shape.hidden && head.rows() == embedding.rows, "the head");
}

void Decoder::add_layer(DecoderLayer layer) {
    const auto [heads, kv_heads, head_dim] = shape_.attention;
    const size_t hidden = shape_.hidden;
    require(is_norm(layer.attention_norm, hidden) && is_norm(layer.mlp_norm, hidden), "a norm");
    for (const auto* norm : {&layer.attention_out_norm, &layer.mlp_out_norm})
        require(norm->empty() || is_norm(*norm, hidden), "a norm of what is added");
    if (layer.linear_attention) {
        ktqueue::check(*layer.linear_attention, hidden);
        require(fits(layer.o, hidden, layer.linear_attention->shape.values()), "o");
        linear_layers_.push_back(layer.linear_attention->shape);
    } else if (layer.latent_attention) {
        const LatentAttentionShape& latent = layer.latent_attention->shape;
        ktqueue::check(*layer.latent_attention, hidden);
        require(latent.heads == heads && kv_heads == 1 && latent.key() == head_dim, "latent attention");
        require(fits(layer.o, hidden, latent.values()), "o");
        require(!layer.gate, "the gate of attention");
        const auto& indexer = layer.latent_attention->indexer;
        const size_t columns = indexer ? indexer->columns : index_columns_;
        require(layers_.empty() || layer.latent_attention->chosen == chosen_, "the number of chosen keys");
        require(!layer.latent_attention->chosen || columns, "a first layer without an indexer");
        require(!index_columns_ || columns == index_columns_, "the indexer");
        chosen_ = layer.latent_attention->chosen;
        index_columns_ = columns;
    } else {
        require(fits(layer.q, heads * head_dim, hidden), "q");
        require(fits(layer.k, kv_heads * head_dim, hidden), "k");
        require(fits(layer.v, kv_heads * head_dim, hidden), "v");
        require(fits(layer.o, hidden, heads * head_dim), "o");
        require(!layer.gate || fits(layer.gate, heads * head_dim, hidden), "the gate of attention");
    }
    const auto whole_or_head = [&](const std::vector<float>& norm, size_t count) {
        return norm.empty() || norm.size() == head_dim || norm.size() == count * head_dim;
    };
    require(whole_or_head(layer.q_norm, heads) && whole_or_head(layer.k_norm, kv_heads), "the norm of q or k");
    require(layer.period > 0, "the period of queries");
    require(layer.sinks.empty() || layer.sinks.size() == heads, "the sinks");
    require(layer.mlp ? layer.mlp->hidden() == hidden && layer.mlp->experts() == 1 : layer.experts != nullptr,
            "the MLP");
    require(!layer.shared_gate || (layer.mlp && fits(layer.shared_gate, 1, hidden)), "the shared expert's gate");
    if (layer.experts) {
        require(layer.experts->hidden() == hidden, "the experts");
        require(fits(layer.router, layer.experts->experts(), hidden), "the router");
        ktqueue::check(layer.routing, layer.experts->experts());
    }
    layers_.push_back(std::move(layer));
}

void Decoder::check(const DecoderStep& step) const {
    const auto refuse = [](const std::string& name, size_t index, size_t limit, int64_t value) {
        throw std::invalid_argument(name + "[" + to_string(index) + "] must be from 0 to " +
                                    to_string(static_cast<int64_t>(limit) - 1) + ", got " + to_string(value));
    };
    ktqueue::check(step.paged);
    if (!linear_layers_.empty()) ktqueue::check(step.slots, step.paged.rows);
    require(2 * step.rotary.half <= shape_.attention.head_dim, "the rotary table");
    for (const DecoderLayer& layer : layers_) {
        require(layer.linear_attention || layer.rotary_table < step.rotary.count, "the number of rotary tables");
        if (layer.latent_attention)
            require(2 * step.rotary.half == layer.latent_attention->shape.rotary, "the rotary table");
    }
    for (size_t t = 0; t < step.paged.tokens; ++t) {
        if (step.ids[t] < 0 || static_cast<size_t>(step.ids[t]) >= embedding_.rows)
            refuse("input_ids", t, embedding_.rows, step.ids[t]);
        if (step.positions[t] < 0 || static_cast<size_t>(step.positions[t]) >= step.rotary.positions)
            refuse("position_ids", t, step.rotary.positions, step.positions[t]);
    }
    for (size_t i = 0; i < step.scored_count; ++i) {
        if (step.scored[i] < 0 || static_cast<size_t>(step.scored[i]) >= step.paged.tokens)
            refuse("logits_to_keep", i, step.paged.tokens, step.scored[i]);
        if (i > 0 && step.scored[i] <= step.scored[i - 1]) throw std::invalid_argument("logits_to_keep must rise");
    }
}

void Decoder::forward(const DecoderStep& step) {
    check(step);
    if (layers_.empty()) throw std::invalid_argument("the decoder has no layers");
    if (step.paged.tokens == 0) return;
    std::lock_guard lock(mutex_);
    const bool scored_only = step.scored_count != step.paged.tokens;
    plan_attention(step.paged, shape_.attention, nullptr, 0, work_.all, chosen_);
    if (scored_only)
        plan_attention(step.paged, shape_.attention, step.scored, step.scored_count, work_.scored, chosen_);
    embed(step);
    size_t attentive = 0, linear = 0;  // layers before this one
    for (const DecoderLayer& layer : layers_) {
        // The last layer continues with the scored tokens only. The other tokens need only their keys and values.
        const bool last = scored_only && &layer == &layers_.back();
        const size_t count = last ? step.scored_count : step.paged.tokens;
        if (layer.linear_attention) {
            attend_linearly(layer, step, linear++, last);
        } else {
            layer.latent_attention ? project_latent(layer, step, attentive, last)
                                   : project(layer, step, attentive, last);
            if (count > 0) attend_layer(layer, step, attentive, last);
            ++attentive;
        }
        if (count == 0) return;
        for (size_t first = 0; first < count; first += kTokensAtOnce)
            feed_forward(layer, first, std::min(kTokensAtOnce, count - first));
    }
    normalise(norm_, 0, step.scored_count);
    head_.forward(work_.normed.data(), shape_.hidden, step.scored_count, step.logits, head_.rows());
    for_tokens(step.scored_count, head_.rows(), [&](size_t i) {
        float* logits = step.logits + i * head_.rows();
        scale(logits, head_.rows(), shape_.logit_scale);
        cap(logits, head_.rows(), shape_.logit_cap);
    });
}

void Decoder::embed(const DecoderStep& step) {
    const DequantizeKernel decode = dequantize_kernel(embedding_.quant);
    const size_t bytes = row_bytes(embedding_.quant, shape_.hidden);
    float* x = grown(work_.x, step.paged.tokens * shape_.hidden);
    for_tokens(step.paged.tokens, shape_.hidden, [&](size_t t) {
        float* row = x + t * shape_.hidden;
        decode(embedding_.data + static_cast<size_t>(step.ids[t]) * bytes, shape_.hidden, row);
        scale(row, shape_.hidden, shape_.embedding_scale);
    });
}

void Decoder::normalise(const std::vector<float>& weight, size_t first, size_t count) {
    const size_t hidden = shape_.hidden;
    float* normed = grown(work_.normed, count * hidden);
    const float* x = work_.x.data() + first * hidden;
    for_tokens(count, hidden, [&](size_t t) { normalise_row(weight, x + t * hidden, normed + t * hidden); });
}

// Without weights, nothing is done.
void Decoder::normalise_row(const std::vector<float>& weight, const float* row, float* out) const {
    const size_t hidden = shape_.hidden;
    if (weight.size() == hidden)
        rms_norm(row, weight.data(), hidden, shape_.epsilon, out);
    else if (!weight.empty())
        layer_norm(row, weight.data(), weight.data() + hidden, hidden, shape_.epsilon, out);
}

// x += feed_forward(norm(x)) for tokens first .. first + count - 1.
void Decoder::feed_forward(const DecoderLayer& layer, size_t first, size_t count) {
    const size_t hidden = shape_.hidden;
    normalise(layer.mlp_norm, first, count);
    LinearCall calls[2];
    size_t used = 0;
    if (layer.experts) {
        const size_t experts = layer.experts->experts();
        calls[used++] = {layer.router, grown(work_.router_logits, count * experts), experts};
    }
    if (layer.shared_gate) calls[used++] = {layer.shared_gate, grown(work_.shares, count), 1};
    run_linears(calls, used, work_.normed.data(), hidden, count);

    const bool both = layer.experts && layer.mlp;
    float* out = grown(work_.out, count * hidden);
    float* shared = both ? grown(work_.shared, count * hidden) : out;
    if (layer.experts) run_experts(layer, count, out);
    if (layer.mlp) run_mlp(layer, count, shared);
    float* x = work_.x.data() + first * hidden;
    for_tokens(count, hidden, [&](size_t t) {
        if (both) add(out + t * hidden, shared + t * hidden, hidden);
        normalise_row(layer.mlp_out_norm, out + t * hidden, out + t * hidden);
        add(x + t * hidden, out + t * hidden, hidden);
    });
}

void Decoder::run_experts(const DecoderLayer& layer, size_t count, float* out) {
    const size_t chosen = layer.routing.chosen, experts = layer.experts->experts();
    int64_t* ids = grown(work_.ids, count * chosen);
    float* weights = grown(work_.routing, count * chosen);
    float* scores = grown(work_.scores, count * experts);
    for_tokens(count, 8 * experts, [&](size_t t) {
        route(work_.router_logits.data() + t * experts, experts, layer.routing, scores + t * experts, ids + t * chosen,
              weights + t * chosen);
    });
    work_.used.assign(experts, 0);
    for (size_t i = 0; i < count * chosen; ++i) work_.used[static_cast<size_t>(ids[i])] = 1;
    experts_used_ += static_cast<uint64_t>(std::count(work_.used.begin(), work_.used.end(), uint8_t{1}));
    ++expert_layers_run_;
    layer.experts->forward(work_.normed.data(), ids, weights, count, chosen, out);
}

void Decoder::run_mlp(const DecoderLayer& layer, size_t count, float* out) {
    const int64_t* zeros = grown(work_.zeros, count);
    float* shares = grown(work_.shares, count);
    for (size_t t = 0; t < count; ++t) shares[t] = layer.shared_gate ? 1.0f / (1.0f + std::exp(-shares[t])) : 1.0f;
    layer.mlp->forward(work_.normed.data(), zeros, shares, count, 1, out);
}

}  // namespace ktqueue
