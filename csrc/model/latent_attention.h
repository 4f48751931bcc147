// Multi-head latent attention of a layer (DeepSeek-V2 and later): all heads share one key per token, and keys are values.
//
// The cache holds a token's latent and, behind it, its rotary key. The matrices that expand a latent to the keys and
// values of a head are applied to the query and to the result instead ("absorbed": arXiv 2405.04434, section 2.1).
// Every token is computed so, since other sums would round differently in other chunks. A token's result does not
// depend on other rows, on the chunks of its row, or on the number of threads.
#pragma once

#include <optional>
#include <vector>

#include "model/indexer.h"
#include "model/linear.h"
#include "model/rotary.h"

namespace ktqueue {

struct LatentAttentionShape {
    size_t heads, latent;
    size_t plain, rotary;  // columns of a head's query without and with a position
    size_t value;          // columns of a head's value

    size_t key() const { return latent + rotary; }
    size_t queries() const { return heads * (plain + rotary); }
    size_t values() const { return heads * value; }
};

// Matrices belong to the caller. The rotary rows of `query` and `key` are in the order of rotate().
struct LatentAttention {
    LatentAttentionShape shape{};
    const Linear* low_rank = nullptr;  // [rank, hidden] of the query, with a norm behind it; null: there is none
    const Linear* query = nullptr;     // [queries, rank], or [queries, hidden]
    const Linear* key = nullptr;       // [latent + rotary, hidden]
    const Linear* absorb = nullptr;    // for each head [latent, plain]: see HeadsCall
    const Linear* expand = nullptr;    // for each head [value, latent]
    std::vector<float> low_rank_norm;  // [rank], or empty
    std::vector<float> latent_norm;    // [latent]
    float epsilon = 0;                 // of both norms
    // A query at position p is multiplied by growth_factor(growth, period, p).
    float growth = 0;
    float period = 1;
    // A token that sees more keys attends to so many, as the indexer of this layer or of the last one before that has
    // an indexer chooses. 0: it attends to all, and there is no indexer.
    size_t chosen = 0;
    std::optional<Indexer> indexer;
};

// Throws std::invalid_argument if the parts do not fit each other or `hidden`.
void check(const LatentAttention& layer, size_t hidden);

// Normalises and rotates a token's key in place. key: [latent + rotary]; cosine, sine: of its position.
void finish_key(const LatentAttention& layer, const float* cosine, const float* sine, float* key);

// Normalises low-rank queries [tokens, rank] in place, and multiplies them: projected, [tokens, queries]; indexed:
// queries of the indexer [tokens, heads, columns], or null.
void expand_queries(const LatentAttention& layer, size_t tokens, float* low_rank, float* projected, float* indexed);

// Turns projected queries into those that the cache's keys are multiplied by. projected: [tokens, queries], overwritten;
// absorbed: [tokens, heads, latent + rotary]; positions: [tokens]; cosine, sine: of all positions.
void absorb_queries(const LatentAttention& layer, const float* cosine, const float* sine, const int64_t* positions,
                    size_t tokens, float* projected, float* absorbed);

// Turns sums of keys, [tokens, heads, latent + rotary], into values [tokens, heads, value].
void expand_values(const LatentAttention& layer, const float* attended, size_t tokens, float* values);

}  // namespace ktqueue
