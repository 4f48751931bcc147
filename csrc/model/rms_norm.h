// Norms as transformers computes them. x, out: [count]; out may be x. Sums use sixteen lanes on every machine.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace ktqueue {

// The sum of term(x[i]).
template <class Term>
float sum_of(const float* x, size_t count, const Term& term) {
    float lanes[16] = {};
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (size_t lane = 0; lane < 16; ++lane) lanes[lane] += term(x[i + lane]);
    for (size_t lane = 0; i < count; ++i, ++lane) lanes[lane] += term(x[i]);
    for (size_t half = 8; half > 0; half /= 2)
        for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// RMSNorm: out = weight * (x / sqrt(mean(x^2) + epsilon)), rounded in that order. weight: [count].
inline void rms_norm(const float* x, const float* weight, size_t count, float epsilon, float* out) {
    const float squares = sum_of(x, count, [](float value) { return value * value; });
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(count) + epsilon);
    for (size_t i = 0; i < count; ++i) out[i] = weight[i] * (x[i] * scale);
}

// LayerNorm: x is moved to a mean of 0 and divided by its standard deviation. weight, bias: [count].
inline void layer_norm(const float* x, const float* weight, const float* bias, size_t count, float epsilon,
                       float* out) {
    const float mean = sum_of(x, count, [](float value) { return value; }) / static_cast<float>(count);
    const float squares = sum_of(x, count, [mean](float value) { return (value - mean) * (value - mean); });
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(count) + epsilon);
    for (size_t i = 0; i < count; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

// Whether a decoder can use the norm for `hidden` columns: weights of an RMSNorm, or weights and biases of a LayerNorm.
inline bool is_norm(const std::vector<float>& norm, size_t hidden) {
    return norm.size() == hidden || norm.size() == 2 * hidden;
}

// Computes that norm of a row. Without weights, nothing is done.
inline void normalise_row(const std::vector<float>& norm, const float* row, size_t hidden, float epsilon, float* out) {
    if (norm.size() == hidden)
        rms_norm(row, norm.data(), hidden, epsilon, out);
    else if (!norm.empty())
        layer_norm(row, norm.data(), norm.data() + hidden, hidden, epsilon, out);
}

}  // namespace ktqueue
