// The attention of a decoder's layers, of all three kinds. The rest of Decoder is in decoder.cpp.
#include <algorithm>
#include <cmath>

#include "model/decoder.h"
#include "model/growth.h"
#include "model/rms_norm.h"
#include "model/rows.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

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

// Moves the rows of the scored tokens to the front.
void Decoder::keep_scored(const DecoderStep& step) {
    const size_t hidden = shape_.hidden;
    for (std::vector<float>* rows : {&work_.x, &work_.normed})
        for (size_t i = 0; i < step.scored_count; ++i)  // scored[i] >= i, since the indices rise
            std::copy_n(rows->data() + static_cast<size_t>(step.scored[i]) * hidden, hidden, rows->data() + i * hidden);
}

// Computes q of the wanted tokens, and k and v of all tokens, which go into the cache.
void Decoder::project(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only) {
    const auto [heads, kv_heads, head_dim] = layer.attention;
    const size_t tokens = step.paged.tokens, q_size = heads * head_dim, kv_size = kv_heads * head_dim;
    const size_t wanted = scored_only ? step.scored_count : tokens;
    float* q = grown(work_.q, wanted * q_size);
    float* k = grown(work_.k, tokens * kv_size);
    float* v = grown(work_.v, tokens * kv_size);
    normalise(layer.attention_norm, tokens);
    LinearCall calls[4];
    size_t calls_used = 0;
    calls[calls_used++] = {layer.k, k, kv_size};
    if (layer.v) calls[calls_used++] = {layer.v, v, kv_size};
    const size_t of_all = calls_used;
    calls[calls_used++] = {layer.q, q, q_size};
    const size_t gates = layer.gate ? layer.gate->rows() : 0;
    if (layer.gate) calls[calls_used++] = {layer.gate, grown(work_.gate, wanted * gates), gates};
    run_linears(calls, scored_only ? of_all : calls_used, work_.normed.data(), shape_.hidden, tokens);
    if (scored_only) {
        keep_scored(step);
        if (wanted) run_linears(calls + of_all, calls_used - of_all, work_.normed.data(), shape_.hidden, wanted);
    }
    const RotaryTables& rotary = step.rotary;
    const auto finish = [&](float* projected, size_t count, const std::vector<float>& norm, size_t token) {
        if (!shape_.norm_after_rotary) normalise_heads(projected, count, head_dim, norm, shape_.epsilon);
        clamp(projected, count * head_dim, layer.clip);
        const size_t position = layer.rotary_table * rotary.positions + static_cast<size_t>(step.positions[token]);
        const size_t offset = position * rotary.half;
        for (size_t head = 0; head < count; ++head)
            rotate(projected + head * head_dim, rotary.cosine + offset, rotary.sine + offset, layer.rotary_pairs);
        if (shape_.norm_after_rotary) normalise_heads(projected, count, head_dim, norm, shape_.epsilon);
    };
    for_tokens(tokens, q_size + 2 * kv_size, [&](size_t t) {
        const size_t slot = static_cast<size_t>(step.paged.slot_mapping[t]) * kv_size;
        if (!layer.v) std::copy_n(k + t * kv_size, kv_size, v + t * kv_size);
        finish(k + t * kv_size, kv_heads, layer.k_norm, t);
        normalise_heads(v + t * kv_size, kv_heads, head_dim, layer.v_norm, shape_.epsilon);
        clamp(v + t * kv_size, kv_size, layer.clip);
        std::copy_n(k + t * kv_size, kv_size, step.cache_keys[index] + slot);
        std::copy_n(v + t * kv_size, kv_size, step.cache_values[index] + slot);
        if (t >= wanted) return;
        const size_t token = scored_only ? static_cast<size_t>(step.scored[t]) : t;
        finish(q + t * q_size, heads, layer.q_norm, token);
        if (layer.growth == 0) return;
        const float factor = growth_factor(layer.growth, layer.period, step.positions[token] + 1);
        for (size_t i = 0; i < q_size; ++i) q[t * q_size + i] *= factor;
    });
}

// The same for latent attention: the keys of all tokens go into the cache, and the queries are absorbed. An indexer
// chooses the keys that they are multiplied by.
void Decoder::project_latent(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only) {
    const LatentAttention& latent = *layer.latent_attention;
    const AttentionPlan& plan = plan_of(layer.attention, scored_only);
    const size_t hidden = shape_.hidden, tokens = step.paged.tokens, key = latent.shape.key();
    const size_t wanted = plan.queries.size(), queries = latent.shape.queries();
    const size_t rank = latent.low_rank_norm.size(), half = step.rotary.half;
    const size_t table = layer.rotary_table * step.rotary.positions * half;
    const float *cosine = step.rotary.cosine + table, *sine = step.rotary.sine + table;
    const Indexer* indexer = latent.indexer ? &*latent.indexer : nullptr;
    const bool chooses = indexer && std::any_of(plan.queries.begin(), plan.queries.end(),
                                                [&](const Query& query) { return plan.chooses(query); });
    const size_t columns = indexer ? indexer->columns : 0, heads = indexer ? indexer->heads : 0;
    float* keys = grown(work_.k, tokens * key);
    float* projected = grown(work_.projected, wanted * queries);
    float* low_rank = grown(work_.low_rank, wanted * rank);
    float* index_keys = grown(work_.index_keys, tokens * columns);
    float* index_queries = grown(work_.index_queries, wanted * heads * columns);
    float* index_weights = grown(work_.index_weights, wanted * heads);
    normalise(layer.attention_norm, tokens);
    LinearCall calls[4];
    size_t count = 0;
    calls[count++] = {latent.key, keys, key};
    if (indexer) calls[count++] = {indexer->key, index_keys, columns};
    const size_t of_all = count;
    calls[count++] =
        latent.low_rank ? LinearCall{latent.low_rank, low_rank, rank} : LinearCall{latent.query, projected, queries};
    if (chooses) calls[count++] = {indexer->weights, index_weights, heads};
    run_linears(calls, scored_only ? of_all : count, work_.normed.data(), hidden, tokens);
    for_tokens(tokens, 2 * (key + columns), [&](size_t t) {
        const size_t offset = static_cast<size_t>(step.positions[t]) * half;
        const auto slot = static_cast<size_t>(step.paged.slot_mapping[t]);
        finish_key(latent, cosine + offset, sine + offset, keys + t * key);
        std::copy_n(keys + t * key, key, step.cache_keys[index] + slot * key);
        if (!indexer) return;
        finish_key(*indexer, cosine + offset, sine + offset, half, index_keys + t * columns);
        std::copy_n(index_keys + t * columns, columns, step.index_keys[index] + slot * columns);
    });
    const int64_t* positions = step.positions;
    if (scored_only) {
        keep_scored(step);
        int64_t* kept = grown(work_.positions, wanted);
        for (size_t i = 0; i < wanted; ++i) kept[i] = step.positions[step.scored[i]];
        positions = kept;
        run_linears(calls + of_all, count - of_all, work_.normed.data(), hidden, wanted);
    }
    if (latent.low_rank) expand_queries(latent, wanted, low_rank, projected, chooses ? index_queries : nullptr);
    if (chooses) {
        for_tokens(wanted, heads * columns, [&](size_t t) {
            const size_t offset = static_cast<size_t>(positions[t]) * half;
            finish_query(*indexer, cosine + offset, sine + offset, half, index_queries + t * heads * columns,
                         index_weights + t * heads);
        });
        choose_keys(step.paged, plan, *indexer,
                    {index_queries, index_weights, step.index_keys[index], grown(work_.choice, tokens * plan.chosen)},
                    kernels_, work_.index_scores);
    }
    absorb_queries(latent, cosine, sine, positions, wanted, projected,
                   grown(work_.q, wanted * latent.shape.heads * key));
}

void Decoder::attend_layer(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only) {
    const auto [heads, kv_heads, head_dim] = layer.attention;
    const size_t q_size = heads * head_dim;
    const AttentionPlan& plan = plan_of(layer.attention, scored_only);
    const size_t count = plan.queries.size();
    float* attended = grown(work_.attended, count * q_size);
    attend(step.paged, layer.attention, plan,
           {work_.q.data(), head_dim, q_size, step.cache_keys[index], step.cache_values[index], shape_.scaling,
            shape_.score_cap, layer.sliding_window, layer.chunk, layer.sinks.empty() ? nullptr : layer.sinks.data(),
            attended, work_.choice.data()},
           kernels_);
    if (layer.gate) multiply_by_gate(layer, attended, count);
    if (!layer.latent_attention)
        return add_attended(layer, shorter_values(layer, attended, count), layer.o->columns(), count);
    const size_t width = layer.latent_attention->shape.values();
    float* values = grown(work_.v, count * width);
    expand_values(*layer.latent_attention, attended, count, values);
    add_attended(layer, values, width, count);
}

void Decoder::multiply_by_gate(const DecoderLayer& layer, float* attended, size_t count) {
    const size_t q_size = layer.attention.heads * layer.attention.head_dim;
    const size_t gates = layer.gate->rows(), columns = q_size / gates;  // of a gate
    for_tokens(count, 8 * q_size, [&](size_t t) {
        const float* gate = work_.gate.data() + t * gates;
        float* out = attended + t * q_size;
        if (columns == 1 && !shape_.softplus_gate) return kernels_.multiply_by_sigmoid(gate, q_size, out);
        for (size_t i = 0; i < gates; ++i) {
            const float exponential = std::exp(gate[i]);
            const float softplus = gate[i] > 20 ? gate[i] : std::log1p(exponential);  // as torch
            scale(out + i * columns, columns, shape_.softplus_gate ? softplus : 1 / (1 + 1 / exponential));
        }
    });
}

// Returns the columns of `attended` that o has, in rows without gaps, multiplied by the scale of values.
const float* Decoder::shorter_values(const DecoderLayer& layer, const float* attended, size_t count) {
    const auto [heads, kv_heads, head_dim] = layer.attention;
    const size_t width = layer.o->columns(), value_dim = width / heads;
    if (value_dim == head_dim && shape_.value_scale == 1) return attended;
    float* values = grown(work_.v, count * width);
    for_tokens(count, width, [&](size_t t) {
        for (size_t head = 0; head < heads; ++head)
            std::copy_n(attended + (t * heads + head) * head_dim, value_dim, values + t * width + head * value_dim);
        scale(values + t * width, width, shape_.value_scale);
    });
    return values;
}

// Computes linear attention of all tokens, since each changes the state, and keeps the wanted ones.
void Decoder::attend_linearly(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only) {
    const LinearAttention& attention = *layer.linear_attention;
    const LinearAttentionShape& shape = attention.shape;
    const size_t tokens = step.paged.tokens, values = shape.values(), heads = shape.value_heads;
    normalise(layer.attention_norm, tokens);
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
        normalise_row(layer.attention_out_norm, out + t * hidden, hidden, shape_.epsilon, out + t * hidden);
        add(x + t * hidden, out + t * hidden, hidden);
    });
}

}  // namespace ktqueue
