// Random weights in GGUF blocks, and their products in float64, computed by the plain decoder and a loop.
#pragma once

#include <algorithm>
#include <set>

#include "formats/packed_matrix.h"
#include "kernels/prepared_rows.h"
#include "random.h"

namespace ktqueue {

// Weights as a file stores them, and the results that a kernel should compute.
class Matrix {
  public:
    // `columns` must fit the format.
    Matrix(Random& random, Quant quant, size_t rows, size_t columns);

    Quant quant() const { return quant_; }
    size_t rows() const { return rows_; }
    size_t columns() const { return columns_; }
    const uint8_t* data() const { return data_.data(); }
    StoredMatrix stored() const { return {quant_, rows_, columns_, data_.data()}; }

    // Rows with a scale or weight that is not finite.
    const std::set<size_t>& bad_rows() const { return bad_rows_; }

    double weight(size_t row, size_t column) const { return weights_[row * columns_ + column]; }

    // The largest weight of this matrix and of those that share its tiles' unit.
    double largest() const { return largest_; }
    void share_tiles_with(const Matrix& other) { largest_ = std::max(largest_, other.largest_); }

    // A row times x: the product, and a bound of the magnitude of all partial sums. The bound includes a small share of
    // the largest weight of all matrices with the same unit, for small weights in tiles (see kernels/tile_operands.h).
    struct Product {
        double value, size;
        double
            root;  // of the sum of squared terms, in which a superblock's largest weight stands for each of its weights
        double sum;  // of the magnitudes of x
    };
    Product times(size_t row, const std::vector<double>& x) const;

  private:
    void fill(Random& random);

    Quant quant_;
    size_t rows_, columns_;
    Guarded<uint8_t> data_;
    std::vector<float> weights_;
    double largest_ = 0;
    std::set<size_t> bad_rows_;
};

// Formats, and columns (at most `most`) that fit all of them.
std::vector<Quant> random_quants(Random& random, size_t count);
size_t random_columns(Random& random, const std::vector<Quant>& quants, size_t most);

// One row as the kernels for `quant` use it without tiles: rounded to int8 with a scale per 32 columns, or unchanged.
std::vector<double> seen(const float* x, size_t columns, Quant quant, Precision precision);

// Whether `error` is a message that pack_panel should give, with a row that is bad.
bool names_a_bad_row(const std::string& error, const Matrix& matrix);

}  // namespace ktqueue
