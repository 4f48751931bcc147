// Linear attention of a layer (Qwen3-Next's gated delta rule): a state per sequence takes the place of keys and values.
//
// A sequence's state is in a slot of the cache. A step reads one slot for each row and writes one, which may be the
// same. A row may read what the row before it writes: it continues that row, and both states are kept.
// A token's result does not depend on other rows, on the chunks of its row, or on the number of threads.
#pragma once

#include <vector>

#include "kernels/kernel_table.h"
#include "model/linear.h"
#include "model/paged_attention.h"

namespace ktqueue {

struct LinearAttentionShape {
    size_t key_heads, value_heads, key_dim, value_dim, taps;
    bool tiled;  // value heads of a key head are key_heads apart; otherwise they are neighbours

    size_t keys() const { return key_heads * key_dim; }
    size_t values() const { return value_heads * value_dim; }
    size_t key_head(size_t head) const { return tiled ? head % key_heads : head / (value_heads / key_heads); }
    size_t channels() const { return 2 * keys() + values(); }  // of the convolution: query, key, value
};

// Matrices belong to the caller.
struct LinearAttention {
    LinearAttentionShape shape{};
    const Linear *qkv = nullptr, *gate = nullptr;    // [channels, hidden], [values, hidden]
    const Linear *decay = nullptr, *rate = nullptr;  // [value_heads, hidden]
    std::vector<float> convolution;                  // [taps, channels], the last one for the token itself
    std::vector<float> decay_rates, decay_biases;    // [value_heads]
    std::vector<float> norm;                         // [value_dim]
};

// Throws std::invalid_argument if the parts do not fit each other or `hidden`, or if no kernel has such sizes.
void check(const LinearAttention& layer, size_t hidden);

// Slots of the state, [rows] each.
struct StateStep {
    const int32_t *sources, *targets;
    size_t slots;  // of the cache

    // Whether the row reads what the row before it writes.
    bool continues(size_t row) const {
        return row > 0 && sources[row] == targets[row - 1] && sources[row] != targets[row];
    }
};

// Throws std::invalid_argument if a slot is out of range, or if two rows write one slot, or if a row reads what another
// one writes that is not the row before it.
void check(const StateStep& states, size_t rows);

// Projections of a step, [tokens, ...]: qkv is overwritten. A row that begins with this step starts from zeros.
struct LinearAttentionCall {
    float *qkv, *gate, *decay, *rate;
    float *recent, *states;  // of the cache: [slots, taps - 1, channels], [slots, value_heads, key_dim, value_dim]
    float epsilon;
    float* output;  // [tokens, values]
};

void attend(const PagedStep& step, const StateStep& slots, const LinearAttention& layer,
            const LinearAttentionCall& call, const KernelTable& kernels);

}  // namespace ktqueue
