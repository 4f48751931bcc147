// Causal attention of a block of query vectors over cache pages, and the scores of an indexer, for any vector type.
// Included only by translation units of one instruction set, after a vector header; internal linkage.
//
// The softmax is online: keys come in tiles, in order of position, and a tile never crosses a page. A vector's result
// depends only on its own query, its own range of keys and the page size. Tiles have fixed positions, and a vector's
// sums run over its own keys in order. Four vectors share a tile, to save loads, only if they see the same keys of it.
#pragma once

#include <algorithm>
#include <limits>

#include "kernels/kernel_table.h"

namespace ktqueue {
namespace {

struct Softmax {
    float largest;  // of the scores so far
    float total;    // of exp(score - largest) so far
};

// scores[q][j] = scaling * query[q] . key[j]
template <size_t Queries, size_t Keys>
inline void score_keys(const float* const* query, const float* keys, size_t stride, size_t head_dim, float scaling,
                       size_t j, float (*scores)[kAttentionTile]) {
    Vector8 sums[Queries][Keys];
    for (auto& row : sums)
        for (Vector8& total : row) total = zero();
    for (size_t d = 0; d < head_dim; d += 8) {
        Vector8 key[Keys];
        for (size_t k = 0; k < Keys; ++k) key[k] = load(keys + (j + k) * stride + d);
        for (size_t q = 0; q < Queries; ++q) {
            const Vector8 element = load(query[q] + d);
            for (size_t k = 0; k < Keys; ++k) sums[q][k] = multiply_add(element, key[k], sums[q][k]);
        }
    }
    for (size_t q = 0; q < Queries; ++q)
        for (size_t k = 0; k < Keys; ++k) scores[q][j + k] = scaling * sum(sums[q][k]);
}

// Softly limits scores, up to the next multiple of 8: cap * tanh(score / cap), where tanh(x) = 1 - 2 / (exp(2 x) + 1).
inline void cap_scores(float* scores, size_t count, float cap) {
    const Vector8 one = splat(1.0f), two = splat(2.0f), limit = splat(cap), twice = splat(2.0f / cap);
    for (size_t j = 0; j < count; j += 8) {
        const Vector8 powers = exponential(multiply(load(scores + j), twice));
        store(scores + j, multiply(limit, subtract(one, divide(two, add(powers, one)))));
    }
}

// Replaces scores by weights exp(score - largest) and returns the factor by which earlier sums shrink.
inline float weigh(float* scores, size_t count, Softmax& state) {
    const size_t padded = (count + 7) / 8 * 8;
    std::fill(scores + count, scores + padded, -std::numeric_limits<float>::infinity());
    Vector8 top = splat(state.largest);
    for (size_t j = 0; j < padded; j += 8) top = maximum(load(scores + j), top);
    const float now = largest(top);
    float factor[8];
    store(factor, exponential(splat(state.largest - now)));
    Vector8 total = zero();
    for (size_t j = 0; j < padded; j += 8) {
        const Vector8 weight = exponential(subtract(load(scores + j), splat(now)));
        store(scores + j, weight);
        total = add(total, weight);
    }
    state.total = state.total * factor[0] + sum(total);
    state.largest = now;
    return factor[0];
}

template <size_t Queries, size_t Width>
inline void add_values(const float (*weights)[kAttentionTile], const float* factor, const float* values, size_t stride,
                       size_t count, float* const* output, size_t d) {
    Vector8 sums[Queries][Width];
    for (size_t q = 0; q < Queries; ++q)
        for (size_t i = 0; i < Width; ++i) sums[q][i] = multiply(splat(factor[q]), load(output[q] + d + 8 * i));
    for (size_t j = 0; j < count; ++j)
        for (size_t i = 0; i < Width; ++i) {
            const Vector8 value = load(values + j * stride + d + 8 * i);
            for (size_t q = 0; q < Queries; ++q) sums[q][i] = multiply_add(splat(weights[q][j]), value, sums[q][i]);
        }
    for (size_t q = 0; q < Queries; ++q)
        for (size_t i = 0; i < Width; ++i) store(output[q] + d + 8 * i, sums[q][i]);
}

// One tile of `count` keys for vectors that see all of it.
template <size_t Queries>
inline void attend_tile(const AttentionTask& task, size_t first_vector, const float* keys, const float* values,
                        size_t count, Softmax* states) {
    const float* const* query = task.query + first_vector;
    float* const* output = task.output + first_vector;
    float scores[Queries][kAttentionTile];
    constexpr size_t kStep = Queries == 1 ? 4 : 2;
    size_t j = 0;
    for (; j + kStep <= count; j += kStep)
        score_keys<Queries, kStep>(query, keys, task.slot_stride, task.head_dim, task.scaling, j, scores);
    for (; j < count; ++j)
        score_keys<Queries, 1>(query, keys, task.slot_stride, task.head_dim, task.scaling, j, scores);
    if (task.score_cap != 0)
        for (size_t q = 0; q < Queries; ++q) cap_scores(scores[q], count, task.score_cap);
    float factor[Queries];
    for (size_t q = 0; q < Queries; ++q) factor[q] = weigh(scores[q], count, states[first_vector + q]);
    size_t d = 0;
    for (; d + 16 <= task.head_dim; d += 16)
        add_values<Queries, 2>(scores, factor, values, task.slot_stride, count, output, d);
    for (; d < task.head_dim; d += 8)
        add_values<Queries, 1>(scores, factor, values, task.slot_stride, count, output, d);
}

// The keys of all vectors are ranges of the sequence.
inline void attend_pages(const AttentionTask& task, Softmax* states) {
    size_t first = task.first_key[0], last = 0;
    for (size_t v = 0; v < task.vectors; ++v) {
        first = std::min(first, task.first_key[v]);
        last = std::max(last, task.last_key[v]);
    }
    for (size_t page = first / task.page_size; page * task.page_size < last; ++page) {
        for (size_t slot = 0; slot < task.page_size; slot += kAttentionTile) {
            const size_t start = page * task.page_size + slot;
            const size_t end = page * task.page_size + std::min(slot + kAttentionTile, task.page_size);
            const size_t offset = (static_cast<size_t>(task.pages[page]) * task.page_size + slot) * task.slot_stride;
            size_t begin[kMaxVectors], count[kMaxVectors];
            for (size_t v = 0; v < task.vectors; ++v) {
                begin[v] = std::clamp(task.first_key[v], start, end) - start;
                count[v] = std::clamp(task.last_key[v], start + begin[v], end) - start - begin[v];
            }
            for (size_t v = 0; v < task.vectors;) {
                const auto same = [&](size_t other) { return begin[other] == begin[v] && count[other] == count[v]; };
                const bool four = v + 4 <= task.vectors && same(v + 1) && same(v + 2) && same(v + 3);
                const size_t skip = offset + begin[v] * task.slot_stride;
                if (count[v] == 0) {
                    ++v;
                } else if (four) {
                    attend_tile<4>(task, v, task.keys + skip, task.values + skip, count[v], states);
                    v += 4;
                } else {
                    attend_tile<1>(task, v, task.keys + skip, task.values + skip, count[v], states);
                    ++v;
                }
            }
        }
    }
}

// The keys of all vectors are those of task.slots. They are copied, since a tile is read once for every four vectors.
inline void attend_slots(const AttentionTask& task, Softmax* states) {
    for (size_t start = 0; start < task.slot_count; start += kAttentionTile) {
        const size_t count = std::min(kAttentionTile, task.slot_count - start);
        for (size_t j = 0; j < count; ++j) {
            const float* key = task.keys + static_cast<size_t>(task.slots[start + j]) * task.slot_stride;
            float* copy = task.copies + j * task.slot_stride;
            for (size_t d = 0; d < task.head_dim; d += 8) store(copy + d, load(key + d));
        }
        size_t v = 0;
        for (; v + 4 <= task.vectors; v += 4) attend_tile<4>(task, v, task.copies, task.copies, count, states);
        for (; v < task.vectors; ++v) attend_tile<1>(task, v, task.copies, task.copies, count, states);
    }
}

void attention(const AttentionTask& task) {
    Softmax states[kMaxVectors];
    for (size_t v = 0; v < task.vectors; ++v) {
        states[v] = {-std::numeric_limits<float>::infinity(), 0.0f};
        if (task.sinks) states[v] = {task.sinks[v], 1.0f};  // exp(sink - sink), and no value
        std::fill(task.output[v], task.output[v] + task.head_dim, 0.0f);
    }
    task.slots ? attend_slots(task, states) : attend_pages(task, states);
    for (size_t v = 0; v < task.vectors; ++v)
        for (size_t d = 0; d < task.head_dim; d += 8)
            store(task.output[v] + d, divide(load(task.output[v] + d), splat(states[v].total)));
}

// A score depends only on its token and its key: neither on tiles nor on the tokens beside it.
void index_scores(const IndexTask& task) {
    const size_t width = task.heads * task.key_dim;
    for (size_t key = task.first; key < task.last;) {
        const size_t slot = key % task.page_size;
        const size_t count = std::min({kAttentionTile, task.page_size - slot, task.last - key});
        const float* keys =
            task.keys + (static_cast<size_t>(task.pages[key / task.page_size]) * task.page_size + slot) * task.key_dim;
        for (size_t t = 0; t < task.tokens; ++t) {
            float totals[kAttentionTile] = {}, products[4][kAttentionTile] = {};
            for (size_t head = 0; head < task.heads; head += 4) {
                const size_t heads = std::min<size_t>(4, task.heads - head);
                const float* query[4];
                for (size_t h = 0; h < heads; ++h) query[h] = task.query + t * width + (head + h) * task.key_dim;
                size_t j = 0;
                if (heads == 4)
                    for (; j + 2 <= count; j += 2)
                        score_keys<4, 2>(query, keys, task.key_dim, task.key_dim, 1.0f, j, products);
                for (; j < count; ++j)
                    for (size_t h = 0; h < heads; ++h)
                        score_keys<1, 1>(query + h, keys, task.key_dim, task.key_dim, 1.0f, j, products + h);
                for (size_t h = 0; h < heads; ++h) {
                    const Vector8 weight = splat(task.weights[t * task.heads + head + h]);
                    for (size_t i = 0; i < count; i += 8)  // maximum returns its second operand if that is NaN
                        store(totals + i,
                              multiply_add(weight, maximum(zero(), load(products[h] + i)), load(totals + i)));
                }
            }
            std::copy_n(totals, count, task.out + t * task.out_stride + (key - task.first));
        }
        key += count;
    }
}

}  // namespace
}  // namespace ktqueue
