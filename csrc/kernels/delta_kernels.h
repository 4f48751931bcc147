// Linear attention by the gated delta rule: the short convolution before it, the rule itself for one head, and the
// sigmoid gate of attention outputs. Source: transformers' modeling_qwen3_next.py.
// Included only by translation units of one instruction set, after a vector header; internal linkage.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/kernel_table.h"

namespace ktqueue {
namespace {

inline Vector8 logistic(Vector8 x) {
    const Vector8 one = splat(1.0f);
    return divide(one, add(one, exponential(subtract(zero(), x))));
}

// Eight channels at a time, with the inputs of the tokens before in registers.
void convolve(const ConvolutionTask& task) {
    for (size_t c = 0; c < task.channels; c += 8) {
        Vector8 before[kMaxTaps - 1], weights[kMaxTaps];
        const size_t last = task.taps - 1;
        for (size_t i = 0; i < last; ++i) before[i] = task.source ? load(task.source + i * task.width + c) : zero();
        for (size_t i = 0; i < task.taps; ++i) weights[i] = load(task.weights + i * task.width + c);
        for (size_t t = 0; t < task.tokens; ++t) {
            float* place = task.x + t * task.stride + c;
            const Vector8 x = load(place);
            Vector8 total = multiply(weights[last], x);
            for (size_t i = 0; i < last; ++i) total = multiply_add(weights[i], before[i], total);
            store(place, multiply(total, logistic(total)));
            for (size_t i = 0; i + 1 < last; ++i) before[i] = before[i + 1];
            if (last) before[last - 1] = x;
        }
        for (size_t i = 0; i < last; ++i) store(task.target + i * task.width + c, before[i]);
    }
}

// x divided by its length, times `scale`.
inline void unit_vector(const float* x, size_t count, float scale, float* out) {
    Vector8 squares = zero();
    for (size_t i = 0; i < count; i += 8) squares = multiply_add(load(x + i), load(x + i), squares);
    const Vector8 factor = splat(scale / std::sqrt(sum(squares) + 1e-6f));
    for (size_t i = 0; i < count; i += 8) store(out + i, multiply(load(x + i), factor));
}

// Columns j .. j + 8 * Width - 1 of the state: state = decay * state + key x (value - memory) * rate, where memory is
// what the decayed state holds for the key. Then output = query * state.
template <size_t Width>
inline void update_columns(const DeltaTask& task, const float* query, const float* key, const float* value, float decay,
                           float rate, float* output, size_t j) {
    const Vector8 kept = splat(decay);
    Vector8 change[Width], sums[Width];
    for (size_t w = 0; w < Width; ++w) change[w] = zero();
    for (size_t i = 0; i < task.key_dim; ++i)
        for (size_t w = 0; w < Width; ++w)
            change[w] = multiply_add(splat(key[i]), load(task.target + i * task.value_dim + j + 8 * w), change[w]);
    for (size_t w = 0; w < Width; ++w) {
        change[w] = multiply(subtract(load(value + j + 8 * w), multiply(kept, change[w])), splat(rate));
        sums[w] = zero();
    }
    for (size_t i = 0; i < task.key_dim; ++i)
        for (size_t w = 0; w < Width; ++w) {
            float* place = task.target + i * task.value_dim + j + 8 * w;
            const Vector8 updated = multiply_add(splat(key[i]), change[w], multiply(kept, load(place)));
            store(place, updated);
            sums[w] = multiply_add(splat(query[i]), updated, sums[w]);
        }
    for (size_t w = 0; w < Width; ++w) store(output + j + 8 * w, sums[w]);
}

inline float softplus(float x) {
    return x > 20.0f ? x : std::log1p(std::exp(x));
}

void delta_rule(const DeltaTask& task) {
    const size_t size = task.key_dim * task.value_dim;
    if (!task.source)
        std::fill_n(task.target, size, 0.0f);
    else if (task.source != task.target)
        std::copy_n(task.source, size, task.target);
    float query[kMaxDeltaDim], key[kMaxDeltaDim];
    for (size_t t = 0; t < task.tokens; ++t) {
        const float* x = task.x + t * task.stride;
        unit_vector(x + task.query_offset, task.key_dim, 1.0f / std::sqrt(static_cast<float>(task.key_dim)), query);
        unit_vector(x + task.key_offset, task.key_dim, 1.0f, key);
        const size_t at = t * task.heads;
        const float decay = std::exp(task.decay_rate * softplus(task.decay[at] + task.decay_bias));
        const float rate = 1.0f / (1.0f + std::exp(-task.rate[at]));
        float* output = task.output + t * task.output_stride;
        const float* value = x + task.value_offset;
        size_t j = 0;
        for (; j + 32 <= task.value_dim; j += 32) update_columns<4>(task, query, key, value, decay, rate, output, j);
        for (; j < task.value_dim; j += 8) update_columns<1>(task, query, key, value, decay, rate, output, j);
        Vector8 squares = zero();
        for (j = 0; j < task.value_dim; j += 8) squares = multiply_add(load(output + j), load(output + j), squares);
        const float mean = sum(squares) / static_cast<float>(task.value_dim);
        const Vector8 factor = splat(1.0f / std::sqrt(mean + task.epsilon));
        const float* gate = task.gate + t * task.output_stride;
        for (j = 0; j < task.value_dim; j += 8) {
            const Vector8 normed = multiply(load(task.norm + j), multiply(load(output + j), factor)),
                          z = load(gate + j);
            store(output + j, multiply(normed, multiply(z, logistic(z))));
        }
    }
}

void multiply_by_sigmoid(const float* gate, size_t count, float* x) {
    for (size_t i = 0; i < count; i += 8) store(x + i, multiply(load(x + i), logistic(load(gate + i))));
}

}  // namespace
}  // namespace ktqueue
