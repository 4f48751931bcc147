// What one instruction set offers: a table of function pointers. The portable table always exists.
#pragma once

#include <string_view>
#include <vector>

#include "formats/activations.h"
#include "formats/quant_format.h"

namespace ktqueue {

// Some panels of a packed matrix times prepared rows: y[t * y_stride + 16 * p + r] for panel p, row r of it, token t.
struct PanelTask {
    const uint8_t* weights;  // first panel, 64-byte aligned
    size_t panels;
    size_t panel_stride;   // bytes from one panel to the next
    size_t columns;        // of the matrix
    const void* const* x;  // [tokens] rows, zero-padded to a multiple of 32 columns, in the kernel's form
    size_t tokens;
    float* y;
    size_t y_stride;  // floats, at least 16 * panels
    float unit = 1;   // power of two that x is multiplied by, for block formats on tiles
};

// A result depends only on its panel and its row of x, and is summed in one fixed order, unless noted otherwise.
using PanelKernel = void (*)(const PanelTask& task);

// Converts x[columns] to ceil(columns / 32) slabs.
using QuantizeKernel = void (*)(const float* x, size_t columns, ActivationKind kind, ActivationSlab* out);

// Converts x[columns] to bf16, rounded to nearest even, with zeros up to a multiple of 32.
using Bf16RowKernel = void (*)(const float* x, size_t columns, uint16_t* out);

// Converts x[columns] times `unit` to bf16, in the column order of block formats on tiles: of each 8 columns 0, 2, 4,
// 6, 1, 3, 5, 7. `columns` is a multiple of 32.
using ShuffleKernel = void (*)(const float* x, size_t columns, float unit, uint16_t* out);

enum class Activation : uint8_t { Silu, Gelu, GeluTanh, SwigluClamped, SiluLimited };

// out[16 b + i] = activation(gate[32 b + i]) * up[32 b + i] for each block b and i < 16. `up` is gate + 16 if panels of
// gate and up alternate. SwigluClamped (gpt-oss) clamps gate from above to `limit` and up from both sides, then
// computes gate * sigmoid(alpha * gate) * (up + 1). SiluLimited (Step-3.5) clamps silu(gate) and up so, and multiplies.
struct GateTask {
    const float *gate, *up;
    float* out;
    size_t blocks;
    float alpha, limit;
};
using GateKernel = void (*)(const GateTask& task);

// The same for rows t < tokens, then converted to slabs or to rows for tiles. 16 columns of gate and 16 of up alternate
// at both + t * stride; the output starts at out + t * out_stride. Block formats have whole slabs of columns, so the
// number of panels is even.
struct ActivationTask {
    const float* both;
    size_t stride;  // floats
    size_t tokens, panels;
    uint8_t* out;
    size_t out_stride;    // bytes
    ActivationKind kind;  // of slabs
    float unit;           // of rows for tiles
    float alpha, limit;
};
using ActivationKernel = void (*)(const ActivationTask& task);

// out[i] = sum over k of weights[k] * terms[k][i], in order of k, for i < count.
struct MergeTask {
    const float* const* terms;
    const float* weights;
    size_t terms_count;
    float* out;
    size_t count;
};
using MergeKernel = void (*)(const MergeTask& task);

// A block of query vectors of one sequence and one key/value head, against the pages of that sequence.
struct AttentionTask {
    const float* const* query;  // [vectors] pointers to head_dim floats
    float* const* output;       // [vectors] pointers to head_dim floats
    const size_t* first_key;    // [vectors] first key that the vector sees (sliding window), else 0
    const size_t* last_key;     // [vectors] one past the last key that the vector sees; > first_key
    const float* sinks;         // [vectors] a score without a value in each softmax; or null
    size_t vectors;             // at most kMaxVectors
    const float* keys;          // the cache at this head: page p, slot s is at (p * page_size + s) * slot_stride
    const float* values;
    const int32_t* pages;  // the sequence's page table
    size_t page_size;
    size_t slot_stride;  // floats
    size_t head_dim;     // a multiple of 8, at most kMaxHeadDim
    float scaling;
    float score_cap;  // a score x becomes cap * tanh(x / cap); 0: it does not
    // All vectors see exactly the keys in these slots of the cache, whose values are the keys. Null: the pages above.
    const int32_t* slots;
    size_t slot_count;
    float* copies;  // room for kAttentionTile keys, slot_stride apart, if there are slots
};

inline constexpr size_t kMaxVectors = 32;
inline constexpr size_t kMaxHeadDim = 1024;
inline constexpr size_t kAttentionTile = 64;  // keys in a tile, at most

using AttentionKernel = void (*)(const AttentionTask& task);

// Scores of an indexer for keys first .. last - 1 of one sequence, each summed over the heads in order:
//     out[t * out_stride + j] = sum over h of weights[t, h] * max(0, query[t, h] . key[first + j])
struct IndexTask {
    const float* query;             // [tokens, heads, key_dim]
    const float* weights;           // [tokens, heads]
    size_t tokens, heads, key_dim;  // key_dim: a multiple of 8
    const float* keys;              // the cache: page p, slot s is at (p * page_size + s) * key_dim
    const int32_t* pages;           // the sequence's page table
    size_t page_size;
    size_t first, last;
    float* out;
    size_t out_stride;  // floats
};
using IndexKernel = void (*)(const IndexTask& task);

inline constexpr size_t kMaxTaps = 8;
inline constexpr size_t kMaxDeltaDim = 512;

// A causal convolution of each channel over the tokens of one sequence, in place, then SiLU.
struct ConvolutionTask {
    float* x;               // the first token at the first channel
    size_t stride, tokens;  // floats from one token to the next
    size_t channels;        // a multiple of 8
    size_t width, taps;     // all channels; weights of a channel, at most kMaxTaps
    const float* weights;   // [taps, width] at the first channel; the last one is for the token itself
    const float* source;    // [taps - 1, width] at the first channel: inputs of the tokens before; null: zeros
    float* target;          // the same after the last token; may be the source
};
using ConvolutionKernel = void (*)(const ConvolutionTask& task);

// The gated delta rule for one value head and the tokens of one sequence, then the gated norm:
//     state = exp(decay_rate * softplus(decay + decay_bias)) * state
//     state += key x (value - key * state) * sigmoid(rate)
//     output = norm(query * state) * silu(gate)
// Keys and queries are divided by their lengths, queries also by the root of key_dim. Dimensions are multiples of 8.
struct DeltaTask {
    const float* x;  // [tokens] rows with query, key and value at their offsets
    size_t stride, tokens;
    size_t query_offset, key_offset, value_offset;
    const float *decay, *rate;  // [tokens, heads] at this head
    size_t heads;
    float decay_rate, decay_bias, epsilon;
    size_t key_dim, value_dim;  // at most kMaxDeltaDim
    const float* source;        // [key_dim, value_dim] the state before; null: zeros
    float* target;              // the state after the last token; may be the source
    const float* norm;          // [value_dim]
    const float* gate;          // [tokens] rows of value_dim, output_stride apart
    float* output;              // the same
    size_t output_stride;
};
using DeltaKernel = void (*)(const DeltaTask& task);

// x[i] *= sigmoid(gate[i]) for i < count, a multiple of 8.
using SigmoidKernel = void (*)(const float* gate, size_t count, float* x);

struct KernelTable {
    const char* isa;
    PanelKernel dot[kQuantCount];    // by Quant; x: ActivationSlab rows; float rows for F32, F16, BF16
    PanelKernel exact[kQuantCount];  // by Quant; x: float rows
    // By Quant, panels times many rows on tiles; null if there is no such kernel. x: bf16 rows at a constant distance,
    // shuffled for block formats. Rounding differs from `dot`.
    PanelKernel tiles[kQuantCount];
    size_t tile_tokens[kQuantCount];  // from how many tokens `tiles` is faster
    QuantizeKernel quantize;
    Bf16RowKernel bf16_row;
    ShuffleKernel shuffle;  // null if no block format has tiles
    MergeKernel merge;
    GateKernel gate[5];                  // by Activation
    ActivationKernel activate[5];        // by Activation, to slabs
    ActivationKernel activate_tiles[5];  // by Activation, to shuffled rows; null as `shuffle`
    AttentionKernel attention;
    IndexKernel index_scores;
    ConvolutionKernel convolve;
    DeltaKernel delta_rule;
    SigmoidKernel multiply_by_sigmoid;
};

}  // namespace ktqueue
