// Rows of activations in the form that the kernel of a weight format needs, and the choice of that kernel.
#pragma once

#include <vector>

#include "kernels/kernel_table.h"

namespace ktqueue {

enum class Precision : uint8_t { Fast, Exact };  // Fast: int8, or bf16 on tiles, if the format allows. Exact: float32

// Whether a token's result is the same however many rows share the weights with it. Off by default: tiles multiply
// where they are faster. On: block formats never use tiles, which would be slow for one row. BF16 and FP8 always do.
void set_batch_invariant(bool on);

// How rows are prepared. Formats with equal forms share prepared rows.
struct RowForm {
    enum class Kind : uint8_t { Slabs, Floats, Bf16, Shuffled } kind;
    ActivationKind activation;  // of Slabs
    float unit;                 // of Shuffled

    bool operator==(const RowForm&) const = default;
};

// The factor of x on tiles for block formats whose weights do not exceed `bound` (see pack_panel()). A power of two, or
// 0 if the weights are too large for tiles.
float tile_unit(float bound);

// The form for weights of `quant` and `tokens` rows that share them. `unit`: the tile_unit() of the weights.
RowForm row_form(const KernelTable& kernels, Quant quant, Precision precision, size_t tokens, float unit);

// Whether kernels need rows of that form at a constant distance, row_distance().
bool at_constant_distance(RowForm form);

// The kernel for that form.
PanelKernel panel_kernel(const KernelTable& kernels, Quant quant, RowForm form);

// Bytes of one prepared row; a multiple of 16.
size_t prepared_bytes(RowForm form, size_t columns);

// Bytes from one prepared row to the next: an odd number of cache lines. Rows a multiple of 4 KB apart would all
// compete for the same few places of the first-level cache.
size_t row_distance(RowForm form, size_t columns);

// How many of `tokens` tokens to pass to a kernel at once, so that all parts have similar sizes of at most `most`.
size_t part_size(size_t tokens, size_t most);

// Writes prepared_bytes() for x[columns] to `out`.
void prepare_row(const KernelTable& kernels, RowForm form, const float* x, size_t columns, void* out);

// The same for columns `column` .. `column` + `count` - 1 only, at their place in the row `out`. `column` is a multiple
// of 32. So is `count`, except for the last columns of a row.
void prepare_columns(const KernelTable& kernels, RowForm form, const float* x, size_t column, size_t count, void* out);

}  // namespace ktqueue
