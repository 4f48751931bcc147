// What an expert layer computes between and after its matrices, for any vector type: activation(gate) * up, the same
// with its rounding for the next matrix, and weighted sums of rows. Included only by translation units of one
// instruction set, after a lanes header and a vector header (Wide, with kWide lanes); internal linkage.
#pragma once

#include <algorithm>

#include "kernels/kernel_table.h"
#include "kernels/row_kernels.h"

namespace ktqueue {
namespace {

// ---- activation(gate) * up

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

// x / 2 * (1 + erf(x / sqrt 2)), with erf by formula 7.1.26 of Abramowitz and Stegun (error at most 1.5e-7).
void gate_gelu(const GateTask& task) {
    for_lanes(task, [](Wide g, Wide u) {
        const Wide z = multiply(maximum(g, subtract(splat_wide(0.0f), g)), splat_wide(0.70710678f));
        const Wide t = divide(splat_wide(1.0f), multiply_add(splat_wide(0.3275911f), z, splat_wide(1.0f)));
        Wide p = splat_wide(1.061405429f);
        for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
            p = multiply_add(p, t, splat_wide(c));
        // 1 + erf is 2 - tail for x >= 0 and tail for x < 0. Both are half of x + |x| - |x| * tail.
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
        // maximum(a, b) returns b if one operand is NaN. The tested number comes second, so a NaN stays NaN.
        g = subtract(splat_wide(0.0f), maximum(negative, subtract(splat_wide(0.0f), g)));
        u = subtract(splat_wide(0.0f), maximum(negative, subtract(splat_wide(0.0f), maximum(negative, u))));
        return multiply(multiply(g, sigmoid(multiply(alpha, g))), add(u, splat_wide(1.0f)));
    });
}

// Step-3.5: silu(g) is clamped from above, u from both sides. For NaN see gate_swiglu_clamped.
void gate_silu_limited(const GateTask& task) {
    const Wide negative = splat_wide(-task.limit);
    for_lanes(task, [&](Wide g, Wide u) {
        g = subtract(splat_wide(0.0f), maximum(negative, subtract(splat_wide(0.0f), multiply(g, sigmoid(g)))));
        u = subtract(splat_wide(0.0f), maximum(negative, subtract(splat_wide(0.0f), maximum(negative, u))));
        return multiply(g, u);
    });
}

// ---- activation and rounding in one call, for many rows
//
// Activation and rounding are each one long chain of operations. No function is called between rows, and all rows pass
// through the first chain, then through the second. The loops are short enough that the processor overlaps several
// rows. The operations are those of the two kernels alone, so results are equal bit for bit.

constexpr size_t kActivatedRows = 16;  // rows at once

// Calls write(activated[32], out) for each slab of each row. A slab takes `bytes` bytes of output.
template <GateKernel Gate, class Write>
inline void activate_rows(const ActivationTask& task, size_t bytes, Write write) {
    constexpr size_t kPanels = kSlab / kPanelRows;
    alignas(64) float activated[kActivatedRows][kSlab];
    for (size_t p = 0; p < task.panels; p += kPanels)
        for (size_t first = 0; first < task.tokens; first += kActivatedRows) {
            const size_t rows = std::min(kActivatedRows, task.tokens - first);
            const float* row = task.both + first * task.stride + p * 2 * kPanelRows;
            uint8_t* out = task.out + first * task.out_stride + p / kPanels * bytes;
            for (size_t t = 0; t < rows; ++t, row += task.stride)
                Gate({row, row + kPanelRows, activated[t], kPanels, task.alpha, task.limit});
            for (size_t t = 0; t < rows; ++t, out += task.out_stride) write(activated[t], out);
        }
}

template <GateKernel Gate>
void activate_slabs(const ActivationTask& task) {
    activate_rows<Gate>(task, sizeof(ActivationSlab), [&](const float* activated, uint8_t* out) {
        quantize_slab(activated, task.kind, *reinterpret_cast<ActivationSlab*>(out));
    });
}

// ---- weighted sums of rows

// One pass over the terms: a part of the sum stays in registers while all terms are added.
template <size_t Width>
inline void merge_stretch(const MergeTask& task, size_t i) {
    Vector8 sums[Width];
    for (Vector8& sum : sums) sum = zero();
    for (size_t k = 0; k < task.terms_count; ++k) {
        const Vector8 weight = splat(task.weights[k]);
        for (size_t v = 0; v < Width; ++v) sums[v] = multiply_add(weight, load(task.terms[k] + i + 8 * v), sums[v]);
    }
    for (size_t v = 0; v < Width; ++v) store(task.out + i + 8 * v, sums[v]);
}

inline void merge(const MergeTask& task) {
    size_t i = 0;
    for (; i + 32 <= task.count; i += 32) merge_stretch<4>(task, i);
    for (; i + 8 <= task.count; i += 8) merge_stretch<1>(task, i);
    for (; i < task.count; ++i) {
        float sum = 0;
        for (size_t k = 0; k < task.terms_count; ++k) sum += task.weights[k] * task.terms[k][i];
        task.out[i] = sum;
    }
}

}  // namespace
}  // namespace ktqueue
