#include "model/latent_attention.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "model/growth.h"
#include "model/rms_norm.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

void require(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(std::string(what) + " does not fit latent attention");
}

bool fits(const Linear* linear, size_t rows, size_t columns) {
    return linear && linear->rows() == rows && linear->columns() == columns;
}

}  // namespace

void check(const LatentAttention& layer, size_t hidden) {
    const LatentAttentionShape& shape = layer.shape;
    const size_t rank = layer.low_rank ? layer.low_rank->rows() : 0;
    require(shape.heads > 0 && shape.latent > 0 && shape.rotary % 2 == 0 && layer.period > 0, "a size");
    require(!layer.low_rank || fits(layer.low_rank, rank, hidden), "the first matrix of the query");
    require(fits(layer.query, shape.queries(), layer.low_rank ? rank : hidden), "the query");
    require(fits(layer.key, shape.key(), hidden), "the key");
    require(fits(layer.absorb, shape.heads * block_rows(shape.latent), shape.plain), "the matrix of keys");
    require(fits(layer.expand, shape.heads * block_rows(shape.value), shape.latent), "the matrix of values");
    require(layer.low_rank_norm.size() == rank, "the norm of the query");
    require(layer.latent_norm.size() == shape.latent, "the norm of the latent");
    require(!layer.indexer || layer.chosen > 0, "the number of chosen keys");
    if (layer.indexer) check(*layer.indexer, hidden, rank, shape.rotary);
}

void finish_key(const LatentAttention& layer, const float* cosine, const float* sine, float* key) {
    const LatentAttentionShape& shape = layer.shape;
    rms_norm(key, layer.latent_norm.data(), shape.latent, layer.epsilon, key);
    rotate(key + shape.latent, cosine, sine, shape.rotary / 2);
}

void expand_queries(const LatentAttention& layer, size_t tokens, float* low_rank, float* projected, float* indexed) {
    const size_t rank = layer.low_rank_norm.size();
    for_tokens(tokens, rank, [&](size_t t) {
        float* row = low_rank + t * rank;
        rms_norm(row, layer.low_rank_norm.data(), rank, layer.epsilon, row);
    });
    LinearCall calls[2] = {{layer.query, projected, layer.shape.queries()}};
    if (indexed) calls[1] = {layer.indexer->query, indexed, layer.indexer->heads * layer.indexer->columns};
    run_linears(calls, indexed ? 2 : 1, low_rank, rank, tokens);
}

void absorb_queries(const LatentAttention& layer, const float* cosine, const float* sine, const int64_t* positions,
                    size_t tokens, float* projected, float* absorbed) {
    const LatentAttentionShape& shape = layer.shape;
    const size_t width = shape.plain + shape.rotary, half = shape.rotary / 2, key = shape.key();
    for_tokens(tokens, shape.queries(), [&](size_t t) {
        float* query = projected + t * shape.queries();
        if (layer.growth != 0) {
            const float factor = growth_factor(layer.growth, layer.period, positions[t]);
            for (size_t i = 0; i < shape.queries(); ++i) query[i] *= factor;
        }
        const size_t offset = static_cast<size_t>(positions[t]) * half;
        for (size_t head = 0; head < shape.heads; ++head) {
            float* turned = query + head * width + shape.plain;
            rotate(turned, cosine + offset, sine + offset, half);
            std::copy_n(turned, shape.rotary, absorbed + (t * shape.heads + head) * key + shape.latent);
        }
    });
    run_heads(
        {layer.absorb, shape.heads, shape.latent, projected, shape.queries(), width, absorbed, shape.heads * key, key},
        tokens);
}

void expand_values(const LatentAttention& layer, const float* attended, size_t tokens, float* values) {
    const LatentAttentionShape& shape = layer.shape;
    run_heads({layer.expand, shape.heads, shape.value, attended, shape.heads * shape.key(), shape.key(), values,
               shape.values(), shape.value},
              tokens);
}

}  // namespace ktqueue
