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

template <class T>
T* grown(std::vector<T>& buffer, size_t count) {
    if (buffer.size() < count) buffer.resize(count);
    return buffer.data();
}

void add(float* x, const float* y, size_t count) {
    for (size_t i = 0; i < count; ++i) x[i] += y[i];
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

// Normalises the heads of one token, each head alone or all as one vector.
void normalise_heads(float* heads, size_t count, size_t head_dim, const std::vector<float>& weight, float epsilon) {
    if (weight.empty()) return;
    for (size_t offset = 0; offset < count * head_dim; offset += weight.size())
        rms_norm(heads + offset, weight.data(), weight.size(), epsilon, heads + offset);
}

void clamp(float* values, size_t count, float limit) {
    if (limit == 0) return;
    for (size_t i = 0; i < count; ++i) values[i] = std::clamp(values[i], -limit, limit);  // NaN stays NaN
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
    plan_attention(step.paged, shape_.attention, nullptr, 0, work_.all);
    if (scored_only) plan_attention(step.paged, shape_.attention, step.scored, step.scored_count, work_.scored);
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

// Moves the rows of the scored tokens to the front.
void Decoder::keep_scored(const DecoderStep& step) {
    const size_t hidden = shape_.hidden;
    for (std::vector<float>* rows : {&work_.x, &work_.normed})
        for (size_t i = 0; i < step.scored_count; ++i)  // scored[i] >= i, since the indices rise
            std::copy_n(rows->data() + static_cast<size_t>(step.scored[i]) * hidden, hidden, rows->data() + i * hidden);
}

// Computes q of the wanted tokens, and k and v of all tokens, which go into the cache.
void Decoder::project(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only) {
    const auto [heads, kv_heads, head_dim] = shape_.attention;
    const size_t tokens = step.paged.tokens, q_size = heads * head_dim, kv_size = kv_heads * head_dim;
    const size_t wanted = scored_only ? step.scored_count : tokens;
    float* q = grown(work_.q, wanted * q_size);
    float* k = grown(work_.k, tokens * kv_size);
    float* v = grown(work_.v, tokens * kv_size);
    normalise(layer.attention_norm, 0, tokens);
    const LinearCall calls[] = {{layer.k, k, kv_size},
                                {layer.v, v, kv_size},
                                {layer.q, q, q_size},
                                {layer.gate, layer.gate ? grown(work_.gate, wanted * q_size) : nullptr, q_size}};
    const size_t of_wanted = layer.gate ? 2 : 1;
    run_linears(calls, scored_only ? 2 : 2 + of_wanted, work_.normed.data(), shape_.hidden, tokens);
    if (scored_only) {
        keep_scored(step);
        if (wanted) run_linears(calls + 2, of_wanted, work_.normed.data(), shape_.hidden, wanted);
    }
    const RotaryTables& rotary = step.rotary;
    const auto finish = [&](float* projected, size_t count, const std::vector<float>& norm, size_t token) {
        if (!shape_.norm_after_rotary) normalise_heads(projected, count, head_dim, norm, shape_.epsilon);
        clamp(projected, count * head_dim, layer.clip);
        const size_t position = layer.rotary_table * rotary.positions + static_cast<size_t>(step.positions[token]);
        const size_t offset = position * rotary.half;
        for (size_t head = 0; head < (layer.rotated ? count : 0); ++head)
            rotate(projected + head * head_dim, rotary.cosine + offset, rotary.sine + offset, rotary.half);
        if (shape_.norm_after_rotary) normalise_heads(projected, count, head_dim, norm, shape_.epsilon);
    };
    for_tokens(tokens, q_size + 2 * kv_size, [&](size_t t) {
        const size_t slot = static_cast<size_t>(step.paged.slot_mapping[t]) * kv_size;
        finish(k + t * kv_size, kv_heads, layer.k_norm, t);
        clamp(v + t * kv_size, kv_size, layer.clip);
        std::copy_n(k + t * kv_size, kv_size, step.cache_keys[index] + slot);
        std::copy_n(v + t * kv_size, kv_size, step.cache_values[index] + slot);
        if (t < wanted)
            finish(q + t * q_size, heads, layer.q_norm, scored_only ? static_cast<size_t>(step.scored[t]) : t);
    });
}

// The same for latent attention: the keys of all tokens go into the cache, and the queries are absorbed.
void Decoder::project_latent(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only) {
    const LatentAttention& latent = *layer.latent_attention;
    const size_t hidden = shape_.hidden, tokens = step.paged.tokens, key = latent.shape.key();
    const size_t wanted = scored_only ? step.scored_count : tokens, queries = latent.shape.queries();
    const size_t rank = latent.low_rank_norm.size();
    const size_t table = layer.rotary_table * step.rotary.positions * step.rotary.half;
    const float *cosine = step.rotary.cosine + table, *sine = step.rotary.sine + table;
    float* keys = grown(work_.k, tokens * key);
    float* projected = grown(work_.projected, wanted * queries);
    float* low_rank = grown(work_.low_rank, wanted * rank);
    normalise(layer.attention_norm, 0, tokens);
    const LinearCall calls[] = {
        {latent.key, keys, key},
        latent.low_rank ? LinearCall{latent.low_rank, low_rank, rank} : LinearCall{latent.query, projected, queries}};
    run_linears(calls, scored_only ? 1 : 2, work_.normed.data(), hidden, tokens);
    for_tokens(tokens, 2 * key, [&](size_t t) {
        const size_t offset = static_cast<size_t>(step.positions[t]) * step.rotary.half;
        finish_key(latent, cosine + offset, sine + offset, keys + t * key);
        std::copy_n(keys + t * key, key,
                    step.cache_keys[index] + static_cast<size_t>(step.paged.slot_mapping[t]) * key);
    });
    const int64_t* positions = step.positions;
    if (scored_only) {
        keep_scored(step);
        int64_t* kept = grown(work_.positions, wanted);
        for (size_t i = 0; i < wanted; ++i) kept[i] = step.positions[step.scored[i]];
        positions = kept;
        run_linears(calls + 1, 1, work_.normed.data(), hidden, wanted);
    }
    if (latent.low_rank) expand_queries(latent, wanted, low_rank, projected);
    absorb_queries(latent, cosine, sine, positions, wanted, projected,
                   grown(work_.q, wanted * latent.shape.heads * key));
}

void Decoder::attend_layer(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only) {
    const auto [heads, kv_heads, head_dim] = shape_.attention;
    const size_t q_size = heads * head_dim;
    const AttentionPlan& plan = scored_only ? work_.scored : work_.all;
    const size_t count = plan.queries.size();
    float* attended = grown(work_.attended, count * q_size);
    attend(step.paged, shape_.attention, plan,
           {work_.q.data(), head_dim, q_size, step.cache_keys[index], step.cache_values[index], shape_.scaling,
            shape_.score_cap, layer.sliding_window, layer.sinks.empty() ? nullptr : layer.sinks.data(), attended},
           kernels_);
    if (layer.gate)
        for_tokens(count, 8 * q_size, [&](size_t t) {
            kernels_.multiply_by_sigmoid(work_.gate.data() + t * q_size, q_size, attended + t * q_size);
        });
    if (!layer.latent_attention) return add_attended(layer, attended, q_size, count);
    const size_t width = layer.latent_attention->shape.values();
    float* values = grown(work_.v, count * width);
    expand_values(*layer.latent_attention, attended, count, values);
    add_attended(layer, values, width, count);
}

// Computes linear attention of all tokens, since each changes the state, and keeps the wanted ones.
void Decoder::attend_linearly(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only) {
    const LinearAttention& attention = *layer.linear_attention;
    const LinearAttentionShape& shape = attention.shape;
    const size_t tokens = step.paged.tokens, values = shape.values(), heads = shape.value_heads;
    normalise(layer.attention_norm, 0, tokens);
    const LinearAttentionCall call = {
        .qkv = grown(work_.q, tokens * shape.channels()),
        .gate = grown(work_.gate, tokens * values),
        .decay = grown(work_.decay, tokens * heads),
        .rate = grown(work_.rate, tokens * heads),
        .recent = step.recent[index],
        .states = step.states[index],
        .epsilon = shape_.epsilon,
        .output = grown(work_.attended, tokens * values),
    };
    const LinearCall calls[] = {{attention.qkv, call.qkv, shape.channels()},
                                {attention.gate, call.gate, values},
                                {attention.decay, call.decay, heads},
                                {attention.rate, call.rate, heads}};
    run_linears(calls, 4, work_.normed.data(), shape_.hidden, tokens);
    attend(step.paged, step.slots, attention, call, kernels_);
    if (scored_only) {
        keep_scored(step);
        for (size_t i = 0; i < step.scored_count; ++i)
            std::copy_n(call.output + static_cast<size_t>(step.scored[i]) * values, values, call.output + i * values);
    }
    add_attended(layer, call.output, values, scored_only ? step.scored_count : tokens);
}

// x += o(attended) for the first `count` rows of `width` numbers.
void Decoder::add_attended(const DecoderLayer& layer, const float* attended, size_t width, size_t count) {
    if (count == 0) return;
    const size_t hidden = shape_.hidden;
    float* out = grown(work_.out, count * hidden);
    layer.o->forward(attended, width, count, out, hidden);
    float* x = work_.x.data();
    for_tokens(count, hidden, [&](size_t t) {
        normalise_row(layer.attention_out_norm, out + t * hidden, out + t * hidden);
        add(x + t * hidden, out + t * hidden, hidden);
    });
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
