// A packed matrix times rows: y = x W^T + bias. Knows no Python.
#pragma once

#include <vector>

#include "formats/packed_matrix.h"
#include "kernels/prepared_rows.h"

namespace ktqueue {

class Linear {
  public:
    // Packs the weights with the shared pool; the originals are not needed afterwards. `bias`: [rows] or null; copied.
    // Throws std::invalid_argument if a scale is not finite.
    Linear(const StoredMatrix& weights, const float* bias, Precision precision, const KernelTable& kernels);

    // x: [tokens, columns], rows x_stride floats apart; y: [tokens, rows], rows y_stride floats apart. A row's result
    // does not depend on the number of threads. It depends on the other rows only by whether tiles multiply them (see
    // kernels/kernel_table.h).
    void forward(const float* x, size_t x_stride, size_t tokens, float* y, size_t y_stride) const;

    size_t rows() const { return rows_; }
    size_t columns() const { return columns_; }
    size_t bytes() const { return arena_.bytes(); }  // of packed weights
    const uint8_t* panels() const { return arena_.data(); }
    const KernelTable& kernels() const { return kernels_; }
    RowForm form(size_t tokens) const { return row_form(kernels_, quant_, precision_, tokens, unit_); }

  private:
    friend class LinearJob;
    friend class HeadsJob;
    Quant quant_;
    size_t rows_, columns_, panel_bytes_;
    Precision precision_;
    float unit_;  // tile_unit()
    const KernelTable& kernels_;
    Arena arena_;
    std::vector<float> bias_;
};

struct LinearCall {
    const Linear* linear;
    float* y;
    size_t y_stride;
};

// Multiplies several matrices with equal columns and kernels by the same rows, as one job (q, k and v; gate and up of a
// dense layer). At most 8. Throws std::invalid_argument if columns or kernels differ.
void run_linears(const LinearCall* calls, size_t count, const float* x, size_t x_stride, size_t tokens);

// The rows that a block of `rows` rows takes in the matrix of HeadsCall: a multiple of 16.
inline size_t block_rows(size_t rows) {
    return panel_count(rows) * kPanelRows;
}

// A matrix for each head, multiplied by the rows of that head. Strides are in floats.
struct HeadsCall {
    const Linear* linear;  // [heads * block_rows(rows), columns], without a bias
    size_t heads, rows;    // of the result of a head
    const float* x;        // [tokens, heads, columns]
    size_t x_token_stride, x_head_stride;
    float* y;  // [tokens, heads, rows]
    size_t y_token_stride, y_head_stride;
};

void run_heads(const HeadsCall& call, size_t tokens);

}  // namespace ktqueue
