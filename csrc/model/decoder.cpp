#include "model/decoder.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "model/rms_norm.h"
#include "model/rows.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

using std::to_string;

// Softly limits values to -limit .. limit.
void cap(float* values, size_t count, float limit) {
    if (limit == 0) return;
    for (size_t i = 0; i < count; ++i) values[i] = limit * std::tanh(values[i] / limit);
}

}  // namespace

Decoder::Decoder(const DecoderShape& shape, const StoredMatrix& embedding, std::vector<float> norm, const Linear& head,
                 const KernelTable& kernels)
    : shape_(shape),
      embedding_(embedding),
      norm_(std::move(norm)),
      head_(head),
      kernels_(kernels),
      feed_forward_(shape.hidden, shape.epsilon) {
    require(embedding.columns == shape.hidden, "the embedding");
    require(is_norm(norm_, shape.hidden), "the last norm");
    require(head.columns() == shape.hidden && head.rows() == embedding.rows, "the head");
}

void Decoder::add_layer(DecoderLayer layer) {
    const auto [heads, kv_heads, head_dim] = layer.attention;
    const size_t hidden = shape_.hidden;
    require(is_norm(layer.attention_norm, hidden), "the norm of attention");
    require(layer.attention_out_norm.empty() || is_norm(layer.attention_out_norm, hidden), "the norm after attention");
    ktqueue::check(layer.feed_forward, hidden);
    if (!layer.linear_attention) {
        ktqueue::check(layer.attention);
        require(2 * layer.rotary_pairs <= head_dim, "the number of rotary pairs");
    }
    if (layer.linear_attention) {
        ktqueue::check(*layer.linear_attention, hidden);
        require(fits(layer.o, hidden, layer.linear_attention->shape.values()), "o");
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
        require(!layer.v || fits(layer.v, kv_heads * head_dim, hidden), "v");
        const size_t values = layer.o ? layer.o->columns() : 0;
        require(fits(layer.o, hidden, values) && values % heads == 0 && values <= heads * head_dim, "o");
        require(!layer.gate || fits(layer.gate, heads * head_dim, hidden) || fits(layer.gate, heads, hidden),
                "the gate of attention");
    }
    const auto whole_or_head = [&](const std::vector<float>& norm, size_t count) {
        return norm.empty() || norm.size() == head_dim || norm.size() == count * head_dim;
    };
    require(whole_or_head(layer.q_norm, heads) && whole_or_head(layer.k_norm, kv_heads), "the norm of q or k");
    require(layer.period > 0, "the period of queries");
    require(layer.sinks.empty() || layer.sinks.size() == heads, "the sinks");
    require(layer.v_norm.empty() || layer.v_norm.size() == head_dim, "the norm of v");
    if (layer.linear_attention) {
        linear_layers_.push_back(layer.linear_attention->shape);
    } else {
        attention_layers_.push_back(layer.attention);
        plan_of(layer.attention, false);
    }
    const ExpertLayer* experts = layer.feed_forward.experts;
    expert_uses_.emplace_back(experts ? experts->experts() : 0);
    layers_.push_back(std::move(layer));
}

void Decoder::check(const DecoderStep& step) const {
    const auto refuse = [](const std::string& name, size_t index, size_t limit, int64_t value) {
        throw std::invalid_argument(name + "[" + to_string(index) + "] must be from 0 to " +
                                    to_string(static_cast<int64_t>(limit) - 1) + ", got " + to_string(value));
    };
    ktqueue::check(step.paged);
    if (!linear_layers_.empty()) ktqueue::check(step.slots, step.paged.rows);
    for (const DecoderLayer& layer : layers_) {
        require(layer.rotary_pairs <= step.rotary.half, "the rotary table");
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
    require(!choices_ || step.paged.tokens <= choice_tokens_, "the number of tokens whose experts are recorded");
    std::lock_guard lock(mutex_);
    // If the input of the head is kept, it is computed for all tokens.
    const bool scored_only = step.scored_count != step.paged.tokens && !step.hidden;
    for (auto& [shape, all, scored] : plans_) {
        plan_attention(step.paged, shape, nullptr, 0, all, chosen_);
        if (scored_only) plan_attention(step.paged, shape, step.scored, step.scored_count, scored, chosen_);
    }
    embed(step);
    size_t attentive = 0, linear = 0, routed = 0;  // layers before this one
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
        const auto index = static_cast<size_t>(&layer - layers_.data());
        uint16_t* choices = nullptr;
        if (choices_ && layer.feed_forward.experts)
            choices = choices_ + routed++ * choice_tokens_ * layer.feed_forward.routing.chosen;
        feed_forward_.run(layer.feed_forward, work_.x.data(), count, expert_uses_[index].data(), choices);
    }
    if (step.outputs) std::copy_n(work_.x.data(), step.scored_count * shape_.hidden, step.outputs);
    normalise(norm_, step.hidden ? step.paged.tokens : step.scored_count);
    if (step.hidden) keep_hidden(step);
    if (step.scored_count == 0) return;
    head_.forward(work_.normed.data(), shape_.hidden, step.scored_count, step.logits, head_.rows());
    for_tokens(step.scored_count, head_.rows(), [&](size_t i) {
        float* logits = step.logits + i * head_.rows();
        scale(logits, head_.rows(), shape_.logit_scale);
        cap(logits, head_.rows(), shape_.logit_cap);
    });
}

void Decoder::record_choices(uint16_t* choices, size_t tokens, size_t chosen) {
    for (const DecoderLayer& layer : layers_) {
        const FeedForwardLayer& part = layer.feed_forward;
        require(!part.experts || (part.routing.chosen == chosen && part.experts->experts() <= 65536),
                "the number of experts of a token");
    }
    choices_ = choices;
    choice_tokens_ = tokens;
}

size_t Decoder::routed_layers() const {
    return static_cast<size_t>(
        std::count_if(layers_.begin(), layers_.end(), [](const auto& layer) { return layer.feed_forward.experts; }));
}

// Adds the shape to those that are planned in each step, if it is a new one.
AttentionPlan& Decoder::plan_of(const AttentionShape& shape, bool scored_only) {
    auto found =
        std::find_if(plans_.begin(), plans_.end(), [&](const auto& planned) { return planned.shape == shape; });
    if (found == plans_.end()) found = plans_.insert(found, {shape, {}, {}});
    return scored_only ? found->scored : found->all;
}

void Decoder::embed(const DecoderStep& step) {
    const DequantizeKernel decode = dequantize_kernel(embedding_.quant);
    const size_t bytes = row_bytes(embedding_.quant, shape_.hidden);
    float* x = grown(work_.x, step.paged.tokens * shape_.hidden);
    if (step.inputs) {
        std::copy_n(step.inputs, step.paged.tokens * shape_.hidden, x);
        return;
    }
    for_tokens(step.paged.tokens, shape_.hidden, [&](size_t t) {
        float* row = x + t * shape_.hidden;
        decode(embedding_.data + static_cast<size_t>(step.ids[t]) * bytes, shape_.hidden, row);
        scale(row, shape_.hidden, shape_.embedding_scale);
    });
}

// Writes the input of the head of all tokens to their slots. Then the rows of the scored ones come first.
void Decoder::keep_hidden(const DecoderStep& step) {
    const size_t hidden = shape_.hidden;
    float* normed = work_.normed.data();
    for (size_t t = 0; t < step.paged.tokens; ++t)
        std::copy_n(normed + t * hidden, hidden,
                    step.hidden + static_cast<size_t>(step.paged.slot_mapping[t]) * hidden);
    for (size_t i = 0; i < step.scored_count; ++i)
        if (static_cast<size_t>(step.scored[i]) != i)
            std::copy_n(normed + static_cast<size_t>(step.scored[i]) * hidden, hidden, normed + i * hidden);
}

void Decoder::normalise(const std::vector<float>& norm, size_t count) {
    const size_t hidden = shape_.hidden;
    float* normed = grown(work_.normed, count * hidden);
    for_tokens(count, hidden, [&](size_t t) {
        normalise_row(norm, work_.x.data() + t * hidden, hidden, shape_.epsilon, normed + t * hidden);
    });
}

}  // namespace ktqueue
