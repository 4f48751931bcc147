// One step of attention over a paged cache: each token of the step sees the keys and values of its own row up to
// itself. Any mix of prefill chunks and decode rows. Knows no Python.
//
// A model's layers share the step. Call `check` once, `plan_attention` once for the tokens whose output is wanted, and
// `attend` in each layer, after its keys and values have been written. A token's result does not depend on other rows,
// on the chunks of its row, or on the number of threads.
#pragma once

#include <vector>

#include "kernels/kernel_table.h"

namespace ktqueue {

// Where the tokens of a step are in the cache. Arrays are those of Python's StepContext.
struct PagedStep {
    const int32_t* query_starts;     // [rows + 1]
    const int32_t* context_lengths;  // [rows]
    const int32_t* page_table;       // [rows, max_pages]
    const int64_t* slot_mapping;     // [tokens]
    size_t tokens, rows, max_pages;
    size_t pages, page_size;  // of the cache
};

// Throws std::invalid_argument if an index or a size is out of range.
void check(const PagedStep& step);

struct AttentionShape {
    size_t heads, kv_heads, head_dim;
    bool operator==(const AttentionShape&) const = default;
};

// Throws std::invalid_argument if the kernels do not support these heads.
void check(const AttentionShape& shape);

// One token whose attention is wanted: its index in the packed batch, its row, and how many keys of the row it sees at
// most.
struct Query {
    size_t token, row, seen;
};

// Queries first .. last - 1, all of one row, at query heads head .. head + heads - 1, which share a key/value head.
struct AttentionPiece {
    size_t first, last, head, heads;
};

// The work of `attend` for a step, the same in every layer. Buffers only grow.
struct AttentionPlan {
    std::vector<Query> queries;
    std::vector<AttentionPiece> pieces;
    size_t chosen = 0;  // a token that sees more keys attends to so many, which an indexer chooses; 0: to all

    bool chooses(const Query& query) const { return chosen && query.seen > chosen; }
};

// Plans the attention of the tokens in `wanted` ([count] indices in the packed batch, rising; null: all tokens).
void plan_attention(const PagedStep& step, const AttentionShape& shape, const int64_t* wanted, size_t count,
                    AttentionPlan& plan, size_t chosen = 0);

// The arrays of one layer. Strides are in floats; the last dimension (head_dim) is always dense.
struct AttentionLayer {
    const float* query;  // [heads, queries, head_dim]
    size_t query_head_stride, query_token_stride;
    const float *cache_keys, *cache_values;  // [pages, page_size, kv_heads, head_dim]
    float scaling;
    float score_cap;        // a score x becomes cap * tanh(x / cap); 0: it does not
    size_t sliding_window;  // keys that a token sees at most, including itself; 0: no limit
    size_t chunk;           // a token at position p sees keys from p / chunk * chunk on; 0: all keys
    const float* sinks;     // [heads] a score of each head that takes a share of the softmax and has no value; or null
    float* output;          // [queries, heads, head_dim]
    // [tokens, chosen] slots of the keys that a token attends to, if the plan has it choose; its values are the keys.
    const int32_t* choice;
};

void attend(const PagedStep& step, const AttentionShape& shape, const AttentionPlan& plan, const AttentionLayer& layer,
            const KernelTable& kernels);

// A layer's new keys and values, [kv_heads, tokens, head_dim] each, and the caches to write them to.
struct CacheUpdate {
    const float *key, *value;
    size_t key_head_stride, key_token_stride;
    size_t value_head_stride, value_token_stride;
    float *cache_keys, *cache_values;
};

void write_cache(const PagedStep& step, const AttentionShape& shape, const CacheUpdate& update);

}  // namespace ktqueue
