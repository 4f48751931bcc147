// One step of attention over a paged cache: writes the step's keys and values, then attends causally for every token.
// Any mix of prefill chunks and decode rows. Knows nothing of Python.
#pragma once

#include "kernel_table.h"

namespace ktqueue {

// Strides are in floats; the last dimension (head_dim) is always dense.
struct AttentionStep {
    const float *query, *key, *value;  // [heads, tokens, head_dim], [kv_heads, tokens, head_dim] twice
    size_t query_head_stride, query_token_stride;
    size_t key_head_stride, key_token_stride;
    size_t value_head_stride, value_token_stride;
    size_t tokens, heads, kv_heads, head_dim;
    float *cache_keys, *cache_values;  // [pages, page_size, kv_heads, head_dim]
    size_t pages, page_size;
    const int32_t* query_starts;     // [rows + 1]
    const int32_t* context_lengths;  // [rows]
    const int32_t* page_table;       // [rows, max_pages]
    const int64_t* slot_mapping;     // [tokens]
    size_t rows, max_pages;
    float scaling;
    size_t sliding_window;  // keys that a token sees at most, itself included; 0: no limit
    float* output;          // [tokens, heads, head_dim]
};

// Throws std::invalid_argument, before anything is written, if an index or a size is out of range. A token's result
// does not depend on the other rows, on the chunks in which its row was fed, or on the number of threads.
void paged_attention(const AttentionStep& step, const KernelTable& kernels);

}  // namespace ktqueue
