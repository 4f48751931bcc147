// Rows of activations in the form that a weight format's kernel wants, and which kernel that is.
#pragma once

#include <vector>

#include "kernels/kernel_table.h"

namespace ktqueue {

enum class Precision : uint8_t { Fast, Exact };  // int8 (in tiles: bf16) where the format allows; float32

// Whether a token's result is the same however many rows share the weights with it. Off at first: tiles multiply where
// they are faster. On: block formats never run on tiles, since one row there would be slow, and BF16 always does.
void set_batch_invariant(bool on);

// How rows are prepared. Formats with equal forms share prepared rows.
struct RowForm {
    enum class Kind : uint8_t { Slabs, Floats, Narrow, Shuffled } kind;
    ActivationKind activation;  // of Slabs
    float unit;                 // of Shuffled

    bool operator==(const RowForm&) const = default;
};

// What block formats' x is multiplied by for tiles where no weight exceeds `bound` (see pack_panel()): a power of two, 0
// if the weights are too large for tiles.
float tile_unit(float bound);

// The form for weights of `quant` and `tokens` rows that share them. `unit`: their tile_unit().
RowForm row_form(const KernelTable& kernels, Quant quant, Precision precision, size_t tokens, float unit);

// Whether kernels want rows of that form one after the other, at row_distance().
bool in_order(RowForm form);

// The kernel that takes that form.
PanelKernel panel_kernel(const KernelTable& kernels, Quant quant, RowForm form);

// Bytes of one prepared row; a multiple of 16.
size_t prepared_bytes(RowForm form, size_t columns);

// Bytes from one prepared row to the next: whole cache lines, and an odd number of them, since rows a multiple of 4 KB
// apart would all compete for the same few places of the first-level cache.
size_t row_distance(RowForm form, size_t columns);

// How many of `tokens` to give a kernel at once so that no part is larger than `most` or much smaller than others.
size_t even_parts(size_t tokens, size_t most);

// x[columns] to prepared_bytes() at `out`.
void prepare_row(const KernelTable& kernels, RowForm form, const float* x, size_t columns, void* out);

// The same for columns `column` .. `column` + `count` - 1 alone, at their place in the row `out`. `column` is a multiple
// of 32, and `count` is too unless these are the row's last columns.
void prepare_columns(const KernelTable& kernels, RowForm form, const float* x, size_t column, size_t count, void* out);

}  // namespace ktqueue
