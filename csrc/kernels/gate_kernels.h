// gate = activation(gate) * up, for any vector type: Wide, with kWide lanes, chosen by the translation unit.
// Included only by translation units of one instruction set, after a vector header; internal linkage.
#pragma once

#include "kernels/kernel_table.h"

namespace ktqueue {
namespace {

inline Wide sigmoid(Wide x) {
    const Wide one = splat_wide(1.0f);
    return divide(one, add(one, exponential(subtract(splat_wide(0.0f), x))));
}

template <class Body>
inline void for_lanes(const GateTask& task, Body body) {
    for (size_t b = 0; b < task.blocks; ++b)
        for (size_t i = 0; i < 16; i += kWide)
            store(task.out + 16 * b + i, body(load_wide(task.gate + 32 * b + i), load_wide(task.up + 32 * b + i)));
}

inline void gate_silu(const GateTask& task) {
    for_lanes(task, [](Wide g, Wide u) {
        const Wide denominator = add(splat_wide(1.0f), exponential(subtract(splat_wide(0.0f), g)));
        return multiply(divide(g, denominator), u);
    });
}

// x / 2 * (1 + erf(x / sqrt 2)), erf by formula 7.1.26 of Abramowitz and Stegun: off by 1.5e-7 at most.
void gate_gelu(const GateTask& task) {
    for_lanes(task, [](Wide g, Wide u) {
        const Wide z = multiply(maximum(g, subtract(splat_wide(0.0f), g)), splat_wide(0.70710678f));
        const Wide t = divide(splat_wide(1.0f), multiply_add(splat_wide(0.3275911f), z, splat_wide(1.0f)));
        Wide p = splat_wide(1.061405429f);
        for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
            p = multiply_add(p, t, splat_wide(c));
        // For x >= 0 1 + erf = 2 - tail, for x < 0 tail; both as x + |x| - |x| * tail, halved.
        const Wide tail = multiply(multiply(p, t), exponential(subtract(splat_wide(0.0f), multiply(z, z))));
        const Wide magnitude = maximum(g, subtract(splat_wide(0.0f), g));
        const Wide twice = subtract(add(g, magnitude), multiply(magnitude, tail));
        return multiply(multiply(twice, splat_wide(0.5f)), u);
    });
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
void gate_gelu_tanh(const GateTask& task) {
    for_lanes(task, [](Wide g, Wide u) {
        const Wide cube = multiply_add(multiply(multiply(g, g), splat_wide(0.044715f)), g, g);
        return multiply(multiply(g, sigmoid(multiply(splat_wide(1.5957691216f), cube))), u);
    });
}

// gpt-oss: g is clamped from above, u from both sides; g * sigmoid(alpha g) * (u + 1).
void gate_swiglu_clamped(const GateTask& task) {
    const Wide negative = splat_wide(-task.limit), alpha = splat_wide(task.alpha);
    for_lanes(task, [&](Wide g, Wide u) {
        // maximum(a, b) gives b where one is NaN: the number under test comes second, so that a NaN stays one.
        g = subtract(splat_wide(0.0f), maximum(negative, subtract(splat_wide(0.0f), g)));
        u = subtract(splat_wide(0.0f), maximum(negative, subtract(splat_wide(0.0f), maximum(negative, u))));
        return multiply(multiply(g, sigmoid(multiply(alpha, g))), add(u, splat_wide(1.0f)));
    });
}

}  // namespace
}  // namespace ktqueue
