// Weighted sums of rows, for any vector type.
// Included only by translation units of one instruction set, after a vector header; internal linkage.
#pragma once

#include "kernels/kernel_table.h"

namespace ktqueue {
namespace {

// One pass over the terms: a stretch of the sum stays in registers while all of them are added.
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

void merge(const MergeTask& task) {
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
