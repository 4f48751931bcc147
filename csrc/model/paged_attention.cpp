#include "model/paged_attention.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

using std::to_string;

[[noreturn]] void refuse(const std::string& message) {
    throw std::invalid_argument(message);
}

void attend_piece(const PagedStep& step, const AttentionShape& shape, const AttentionPlan& plan,
                  const AttentionLayer& layer, const AttentionPiece& piece, const KernelTable& kernels) {
    const float* query[kMaxVectors];
    float* output[kMaxVectors];
    size_t first_key[kMaxVectors], last_key[kMaxVectors];
    float sinks[kMaxVectors];
    size_t vectors = 0;
    for (size_t q = piece.first; q < piece.last; ++q)
        for (size_t head = piece.head; head < piece.head + piece.heads; ++head, ++vectors) {
            query[vectors] = layer.query + head * layer.query_head_stride + q * layer.query_token_stride;
            output[vectors] = layer.output + (q * shape.heads + head) * shape.head_dim;
            const size_t seen = plan.queries[q].seen;
            last_key[vectors] = seen;
            if (layer.sinks) sinks[vectors] = layer.sinks[head];
            first_key[vectors] = layer.sliding_window && seen > layer.sliding_window ? seen - layer.sliding_window : 0;
            if (layer.chunk) first_key[vectors] = std::max(first_key[vectors], (seen - 1) / layer.chunk * layer.chunk);
        }
    const Query& last = plan.queries[piece.last - 1];
    const bool chooses = plan.chooses(last);
    thread_local std::vector<float> copies;
    if (chooses && copies.size() < kAttentionTile * shape.head_dim) copies.resize(kAttentionTile * shape.head_dim);
    const size_t kv_offset = piece.head / (shape.heads / shape.kv_heads) * shape.head_dim;
    kernels.attention({query, output, first_key, last_key, layer.sinks ? sinks : nullptr, vectors,
                       layer.cache_keys + kv_offset, layer.cache_values + kv_offset,
                       step.page_table + last.row * step.max_pages, step.page_size, shape.kv_heads * shape.head_dim,
                       shape.head_dim, layer.scaling, layer.score_cap,
                       chooses ? layer.choice + last.token * plan.chosen : nullptr, plan.chosen, copies.data()});
}

// Cuts queries begin .. end - 1 of one row into pieces of at most kMaxVectors query vectors. The longest contexts come
// first, so that the last tasks are short. Queries that choose their keys are alone in their pieces.
void cut_row(const AttentionShape& shape, size_t begin, size_t end, AttentionPlan& plan) {
    const size_t group = shape.heads / shape.kv_heads;
    const size_t heads_at_once = std::min(group, kMaxVectors);
    const size_t queries_at_once = kMaxVectors / heads_at_once;
    for (size_t last = end; last > begin;) {
        const size_t at_once = plan.chooses(plan.queries[last - 1]) ? 1 : queries_at_once;
        const size_t first = last - begin > at_once ? last - at_once : begin;
        for (size_t shared = 0; shared < shape.heads; shared += group)
            for (size_t head = shared; head < shared + group; head += heads_at_once)
                plan.pieces.push_back({first, last, head, std::min(heads_at_once, shared + group - head)});
        last = first;
    }
}

}  // namespace

void check(const AttentionShape& shape) {
    if (shape.head_dim == 0 || shape.head_dim % 8 != 0 || shape.head_dim > kMaxHeadDim)
        refuse("head_dim must be a multiple of 8 and at most " + to_string(kMaxHeadDim) + ", got " +
               to_string(shape.head_dim));
    if (shape.kv_heads == 0 || shape.heads == 0 || shape.heads % shape.kv_heads != 0)
        refuse("heads must be a positive multiple of kv_heads, got " + to_string(shape.heads) + " and " +
               to_string(shape.kv_heads));
}

void check(const PagedStep& step) {
    if (step.page_size == 0) refuse("page_size must be positive");
    if (step.query_starts[0] != 0 || step.query_starts[step.rows] != static_cast<int64_t>(step.tokens))
        refuse("query_starts must run from 0 to the number of tokens (" + to_string(step.tokens) + ")");
    for (size_t row = 0; row < step.rows; ++row) {
        const int64_t fed = static_cast<int64_t>(step.query_starts[row + 1]) - step.query_starts[row];
        const int64_t context = step.context_lengths[row];
        if (fed < 0) refuse("query_starts must not fall, row " + to_string(row));
        if (context < fed)
            refuse("context_lengths[" + to_string(row) + "] is " + to_string(context) + " but the row has " +
                   to_string(fed) + " tokens in this step");
        const size_t used = (static_cast<size_t>(context) + step.page_size - 1) / step.page_size;
        if (used > step.max_pages)
            refuse("context_lengths[" + to_string(row) + "] is " + to_string(context) + ", more than the row's " +
                   to_string(step.max_pages) + " pages hold");
        for (size_t i = 0; i < used; ++i) {
            const int32_t page = step.page_table[row * step.max_pages + i];
            if (page < 0 || static_cast<size_t>(page) >= step.pages)
                refuse("page_table[" + to_string(row) + "][" + to_string(i) + "] must be from 0 to " +
                       to_string(step.pages - 1) + ", got " + to_string(page));
        }
    }
    for (size_t t = 0; t < step.tokens; ++t)
        if (step.slot_mapping[t] < 0 || static_cast<size_t>(step.slot_mapping[t]) >= step.pages * step.page_size)
            refuse("slot_mapping[" + to_string(t) + "] must be from 0 to " +
                   to_string(step.pages * step.page_size - 1) + ", got " + to_string(step.slot_mapping[t]));
}

void plan_attention(const PagedStep& step, const AttentionShape& shape, const int64_t* wanted, size_t count,
                    AttentionPlan& plan, size_t chosen) {
    plan.chosen = chosen;
    plan.queries.clear();
    plan.pieces.clear();
    size_t next = 0;  // index into `wanted`
    for (size_t row = 0; row < step.rows; ++row) {
        const size_t end = static_cast<size_t>(step.query_starts[row + 1]);
        const size_t unseen =
            end - static_cast<size_t>(step.context_lengths[row]);  // may wrap below 0; seen = t + 1 - unseen
        const size_t begin = plan.queries.size();
        const auto add = [&](size_t token) { plan.queries.push_back({token, row, token + 1 - unseen}); };
        if (wanted) {
            for (; next < count && static_cast<size_t>(wanted[next]) < end; ++next)
                add(static_cast<size_t>(wanted[next]));
        } else {
            for (size_t t = static_cast<size_t>(step.query_starts[row]); t < end; ++t) add(t);
        }
        cut_row(shape, begin, plan.queries.size(), plan);
    }
}

void attend(const PagedStep& step, const AttentionShape& shape, const AttentionPlan& plan, const AttentionLayer& layer,
            const KernelTable& kernels) {
    shared_pool()->for_each(plan.pieces.size(),
                            [&](size_t task) { attend_piece(step, shape, plan, layer, plan.pieces[task], kernels); });
}

void write_cache(const PagedStep& step, const AttentionShape& shape, const CacheUpdate& update) {
    for (size_t t = 0; t < step.tokens; ++t)
        for (size_t head = 0; head < shape.kv_heads; ++head) {
            const size_t offset = (static_cast<size_t>(step.slot_mapping[t]) * shape.kv_heads + head) * shape.head_dim;
            std::copy_n(update.key + head * update.key_head_stride + t * update.key_token_stride, shape.head_dim,
                        update.cache_keys + offset);
            std::copy_n(update.value + head * update.value_head_stride + t * update.value_token_stride, shape.head_dim,
                        update.cache_values + offset);
        }
}

}  // namespace ktqueue
