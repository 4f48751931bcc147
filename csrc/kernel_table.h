// What one instruction set offers, as a table of function pointers. The portable table is always there.
#pragma once

#include <string_view>

#include "quant_format.h"

namespace ktqueue {

// y[t * y_stride + r] = sum over c of weights[r][c] * x[t][c], for r < rows and t < tokens.
// `x`: pointers to activation rows, zero-padded to a multiple of 32 columns. `weights`: rows of row_bytes() bytes, any
// alignment. Each sum is taken in one fixed order of c, whatever `rows` and `tokens` are.
using MatrixKernel = void (*)(const uint8_t* weights, size_t rows, size_t columns, const float* const* x, size_t tokens,
                              float* y, size_t y_stride);

// `count` weights (a multiple of the block) to floats.
using DequantizeKernel = void (*)(const uint8_t* data, size_t count, float* target);

// A block of query vectors of one sequence and one key/value head against that sequence's pages.
struct AttentionTask {
    const float* const* query;  // [vectors] pointers to head_dim floats
    float* const* output;       // [vectors] pointers to head_dim floats
    const size_t* first_key;    // [vectors] first key that the vector sees (sliding window), else 0
    const size_t* last_key;     // [vectors] one past the last key that the vector sees; > first_key
    size_t vectors;             // at most kMaxVectors
    const float* keys;          // the cache at this head: page p, slot s at (p * page_size + s) * slot_stride
    const float* values;
    const int32_t* pages;  // the sequence's page table
    size_t page_size;
    size_t slot_stride;  // floats
    size_t head_dim;     // a multiple of 8, at most kMaxHeadDim
    float scaling;
};

inline constexpr size_t kMaxVectors = 32;
inline constexpr size_t kMaxHeadDim = 512;

using AttentionKernel = void (*)(const AttentionTask& task);

// gate[i] = silu(gate[i]) * up[i] for i < count, a multiple of 8.
using GateKernel = void (*)(float* gate, const float* up, size_t count);

struct KernelTable {
    const char* isa;
    MatrixKernel matrix[kQuantCount];  // by Quant
    DequantizeKernel dequantize[kQuantCount];
    GateKernel silu_gate;
    AttentionKernel attention;
};

const KernelTable& portable_kernels();
#if KTQUEUE_HAS_AVX2
const KernelTable& avx2_kernels();
#endif

// The best table for this CPU, not above the environment variable KTQUEUE_ISA (scalar | avx2) where that is set;
// decided at the first call. Throws std::invalid_argument if the variable's value is not known.
const KernelTable& best_kernels();

// The table of that name; empty: best_kernels(). Throws std::invalid_argument if it is unknown or this CPU lacks it.
const KernelTable& kernels_named(std::string_view isa);

}  // namespace ktqueue
