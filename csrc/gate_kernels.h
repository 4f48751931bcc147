// gate = activation(gate) * up, for any vector type.
// Included only by translation units of one instruction set, after a vector header; internal linkage.
#pragma once

#include "kernel_table.h"

namespace ktqueue {
namespace {

inline Vector8 sigmoid(Vector8 x) {
    return divide(splat(1.0f), add(splat(1.0f), exponential(subtract(zero(), x))));
}

template <class Body>
inline void for_eights(const GateTask& task, Body body) {
    for (size_t b = 0; b < task.blocks; ++b)
        for (size_t i = 0; i < 16; i += 8)
            store(task.out + 16 * b + i, body(load(task.gate + 32 * b + i), load(task.up + 32 * b + i)));
}

void gate_silu(const GateTask& task) {
    for_eights(task, [](Vector8 g, Vector8 u) {
        const Vector8 denominator = add(splat(1.0f), exponential(subtract(zero(), g)));
        return multiply(divide(g, denominator), u);
    });
}

// x / 2 * (1 + erf(x / sqrt 2)), erf by formula 7.1.26 of Abramowitz and Stegun: off by 1.5e-7 at most.
void gate_gelu(const GateTask& task) {
    for_eights(task, [](Vector8 g, Vector8 u) {
        const Vector8 z = multiply(maximum(g, subtract(zero(), g)), splat(0.70710678f));
        const Vector8 t = divide(splat(1.0f), multiply_add(splat(0.3275911f), z, splat(1.0f)));
        Vector8 p = splat(1.061405429f);
        for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
            p = multiply_add(p, t, splat(c));
        // For x >= 0 1 + erf = 2 - tail, for x < 0 tail; both as x + |x| - |x| * tail, halved.
        const Vector8 tail = multiply(multiply(p, t), exponential(subtract(zero(), multiply(z, z))));
        const Vector8 magnitude = maximum(g, subtract(zero(), g));
        const Vector8 twice = subtract(add(g, magnitude), multiply(magnitude, tail));
        return multiply(multiply(twice, splat(0.5f)), u);
    });
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) = x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
void gate_gelu_tanh(const GateTask& task) {
    for_eights(task, [](Vector8 g, Vector8 u) {
        const Vector8 cube = multiply_add(multiply(multiply(g, g), splat(0.044715f)), g, g);
        return multiply(multiply(g, sigmoid(multiply(splat(1.5957691216f), cube))), u);
    });
}

// gpt-oss: g is clamped from above, u from both sides; g * sigmoid(alpha g) * (u + 1).
void gate_swiglu_clamped(const GateTask& task) {
    const Vector8 negative = splat(-task.limit), alpha = splat(task.alpha);
    for_eights(task, [&](Vector8 g, Vector8 u) {
        // maximum(a, b) gives b where one is NaN: the number under test comes second, so that a NaN stays one.
        g = subtract(zero(), maximum(negative, subtract(zero(), g)));
        u = subtract(zero(), maximum(negative, subtract(zero(), maximum(negative, u))));
        return multiply(multiply(g, sigmoid(multiply(alpha, g))), add(u, splat(1.0f)));
    });
}

}  // namespace
}  // namespace ktqueue
