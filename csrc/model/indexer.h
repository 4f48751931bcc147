// The indexer of sparse attention (DeepSeek-V3.2, GLM-5), which chooses the keys that a token attends to.
//
// A token that sees more keys than are chosen attends to those with the best scores, of equal ones to the first. A score
// is the sum over the indexer's heads of weight * max(0, query . key). The indexer's keys have a cache of their own. A
// choice does not depend on other rows, on the chunks of its row, or on the number of threads.
#pragma once

#include <vector>

#include "model/linear.h"
#include "model/paged_attention.h"

namespace ktqueue {

// Matrices belong to the caller. The first rows of each head of `query`, and those of `key`, are in the order of
// rotate().
struct Indexer {
    size_t heads = 0, columns = 0;    // of a head's query, and of a key
    const Linear* query = nullptr;    // [heads * columns, rank], of the normalised low-rank query
    const Linear* key = nullptr;      // [columns, hidden]
    const Linear* weights = nullptr;  // [heads, hidden]
    std::vector<float> norm;          // of keys, [2, columns]: weights and biases of a LayerNorm
    float epsilon = 0;                // of that norm
};

// Throws std::invalid_argument if the parts do not fit each other, or heads with `rotary` columns that are rotated.
void check(const Indexer& indexer, size_t hidden, size_t rank, size_t rotary);

// Normalises and rotates a token's key in place. key: [columns]; cosine, sine: of its position, half of each.
void finish_key(const Indexer& indexer, const float* cosine, const float* sine, size_t half, float* key);

// Rotates a token's queries and scales its weights, in place. query: [heads, columns]; weights: [heads].
void finish_query(const Indexer& indexer, const float* cosine, const float* sine, size_t half, float* query,
                  float* weights);

// The arrays of one layer.
struct ChoiceCall {
    const float* query;    // [queries of the plan, heads, columns]
    const float* weights;  // [queries of the plan, heads]
    const float* keys;     // the cache, [pages, page_size, columns]
    int32_t* slots;        // [tokens, chosen] of the cache, in order of position; only of tokens that choose
};

// Chooses keys for each query of the plan that chooses. `scores` is a buffer that grows.
void choose_keys(const PagedStep& step, const AttentionPlan& plan, const Indexer& indexer, const ChoiceCall& call,
                 const KernelTable& kernels, std::vector<float>& scores);

}  // namespace ktqueue
