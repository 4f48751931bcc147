// Memory for packed weights, and the conversion of GGUF rows to panels. Knows no arithmetic.
#pragma once

#include <atomic>

#include "formats/panel_layout.h"

namespace ktqueue {

// Zeroed memory, aligned to 64 bytes, in 2 MB pages if it fills them and the system has them. Takes at most 1/16 or 4
// KB more than its size. Throws std::bad_alloc.
class Arena {
  public:
    explicit Arena(size_t bytes);
    ~Arena();
    Arena(Arena&& other) noexcept;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    size_t bytes_, mapped_;
    uint8_t* data_;
};

// A matrix as a GGUF file stores it.
struct StoredMatrix {
    Quant quant;
    size_t rows, columns;
    const uint8_t* data;  // rows * row_bytes(quant, columns) bytes, any alignment
};

// Raises `most` to at least `value`.
inline void raise(std::atomic<float>& most, float value) {
    float before = most.load(std::memory_order_relaxed);
    while (before < value && !most.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
    }
}

// Bytes of a matrix in a GGUF file. Throws std::invalid_argument unless `columns` is a positive multiple of the block,
// and for more than 2^48 weights, so that no size computed from these overflows.
size_t matrix_bytes(Quant quant, size_t rows, size_t columns);

// Packs the 16 rows of `panel` (zeros beyond the last row of `matrix`) to panel_bytes() bytes at `out`.
// Returns an upper bound of the magnitude of the panel's weights and of their two terms, code times scale and minimum;
// 0 for float formats.
// Throws std::invalid_argument that names the row if a scale, or a weight of a float format, is not finite.
float pack_panel(const StoredMatrix& matrix, size_t panel, uint8_t* out);

}  // namespace ktqueue
