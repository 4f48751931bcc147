// RMSNorm as transformers computes it: out = weight * (x / sqrt(mean(x^2) + epsilon)), rounded in that order. x,
// weight, out: [count]; out may be x. The sum uses sixteen lanes on every machine.
#pragma once

#include <cmath>
#include <cstddef>

namespace ktqueue {

inline void rms_norm(const float* x, const float* weight, size_t count, float epsilon, float* out) {
    float lanes[16] = {};
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (size_t lane = 0; lane < 16; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
    for (size_t lane = 0; i < count; ++i, ++lane) lanes[lane] += x[i] * x[i];
    for (size_t half = 8; half > 0; half /= 2)
        for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    const float scale = 1.0f / std::sqrt(lanes[0] / static_cast<float>(count) + epsilon);
    for (i = 0; i < count; ++i) out[i] = weight[i] * (x[i] * scale);
}

}  // namespace ktqueue
