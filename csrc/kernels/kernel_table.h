// What one instruction set offers, as a table of function pointers. The portable table is always there.
#pragma once

#include <string_view>
#include <vector>

#include "formats/activations.h"
#include "formats/quant_format.h"

namespace ktqueue {

// Some panels of a packed matrix times prepared rows: y[t * y_stride + 16 * p + r] for panels p, their rows r, tokens t.
struct PanelTask {
    const uint8_t* weights;  // first panel, 64-byte aligned
    size_t panels;
    size_t panel_stride;   // bytes from one panel to the next
    size_t columns;        // of the matrix
    const void* const* x;  // [tokens] rows, padded with zeros to a multiple of 32 columns, as the kernel wants them
    size_t tokens;
    float* y;
    size_t y_stride;  // floats, at least 16 * panels
    float unit = 1;   // power of two that x is multiplied by, for block formats in tiles
};

// A result depends on its panel and its row of x alone, and is summed in one fixed order, except where said.
using PanelKernel = void (*)(const PanelTask& task);

// x[columns] to ceil(columns / 32) slabs.
using QuantizeKernel = void (*)(const float* x, size_t columns, ActivationKind kind, ActivationSlab* out);

// x[columns] to bf16, rounded to nearest even, zeros up to a multiple of 32.
using NarrowKernel = void (*)(const float* x, size_t columns, uint16_t* out);

// x[columns], a multiple of 32, times `unit` to bf16 in the order of columns that tiles of block formats have: of each 8
// columns 0, 2, 4, 6, 1, 3, 5, 7.
using ShuffleKernel = void (*)(const float* x, size_t columns, float unit, uint16_t* out);

// `count` weights (a multiple of the block) to floats.
using DequantizeKernel = void (*)(const uint8_t* data, size_t count, float* target);

enum class Activation : uint8_t { Silu, Gelu, GeluTanh, SwigluClamped };

// out[16 b + i] = activation(gate[32 b + i]) * up[32 b + i] for blocks b and i < 16; `up` is gate + 16 where panels of
// gate and up take turns. SwigluClamped (gpt-oss): the gate is clamped from above to `limit`, up from both sides; then
// gate * sigmoid(alpha * gate) * (up + 1).
struct GateTask {
    const float *gate, *up;
    float* out;
    size_t blocks;
    float alpha, limit;
};
using GateKernel = void (*)(const GateTask& task);

// The same, rounded to slabs or for tiles, for rows t < tokens: 16 columns of gate and 16 of up take turns at both + t * stride, slabs
// are written at out + t * out_stride. Block formats have whole slabs of columns, so panels are even in number.
struct MidTask {
    const float* both;
    size_t stride;  // floats
    size_t tokens, panels;
    uint8_t* out;
    size_t out_stride;    // bytes
    ActivationKind kind;  // of slabs
    float unit;           // of rows for tiles
    float alpha, limit;
};
using MidKernel = void (*)(const MidTask& task);

// out[i] = sum over k of weights[k] * terms[k][i], in order of k, for i < count.
struct MergeTask {
    const float* const* terms;
    const float* weights;
    size_t terms_count;
    float* out;
    size_t count;
};
using MergeKernel = void (*)(const MergeTask& task);

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
inline constexpr size_t kMaxHeadDim = 1024;

using AttentionKernel = void (*)(const AttentionTask& task);

struct KernelTable {
    const char* isa;
    PanelKernel dot[kQuantCount];    // by Quant; x: ActivationSlab rows, but float rows for F32, F16, BF16
    PanelKernel exact[kQuantCount];  // by Quant; x: float rows
    // By Quant, panels times many rows at once; null: none. x: bf16 rows, one after the other at a constant distance, for
    // block formats shuffled. Rounded otherwise than `dot`.
    PanelKernel tiles[kQuantCount];
    size_t tile_tokens[kQuantCount];  // from how many tokens `tiles` are faster
    QuantizeKernel quantize;
    NarrowKernel narrow;
    ShuffleKernel shuffle;  // null where no block format has tiles
    MergeKernel merge;
    GateKernel gate[4];      // by Activation
    MidKernel mid[4];        // by Activation, to slabs
    MidKernel mid_tiles[4];  // by Activation, to shuffled rows; as `shuffle`
    AttentionKernel attention;
};

const KernelTable& portable_kernels();
#if KTQUEUE_X86
const KernelTable& avx2_kernels();
const KernelTable& avxvnni_kernels();
const KernelTable& avx512_kernels();
const KernelTable& amx_kernels();
#endif

// The best table for this CPU, not above the environment variable KTQUEUE_ISA (a table's name) where that is set;
// decided at the first call. Throws std::invalid_argument if the variable's value is not known.
const KernelTable& best_kernels();

// The table of that name; empty: best_kernels(). Throws std::invalid_argument if it is unknown or this CPU lacks it.
const KernelTable& kernels_named(std::string_view isa);

// Names of the tables that this CPU can run, slowest first, whatever KTQUEUE_ISA says.
std::vector<const char*> present_kernels();

// Portable, for every format: `count` weights of GGUF blocks to floats.
DequantizeKernel dequantize_kernel(Quant quant);

}  // namespace ktqueue
