// Memory for packed weights, and how rows of a GGUF file become panels. Knows no arithmetic.
#pragma once

#include <atomic>

#include "formats/panel_layout.h"

namespace ktqueue {

// Zeroed memory, 64-byte aligned, in 2 MB pages where it fills them and the system has them; of its size to 1/16 or 4
// KB. Throws std::bad_alloc.
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

// A matrix as it lies in a GGUF file.
struct StoredMatrix {
    Quant quant;
    size_t rows, columns;
    const uint8_t* data;  // rows * row_bytes(quant, columns) bytes, any alignment
};

// Makes `most` at least `value`.
inline void raise(std::atomic<float>& most, float value) {
    float before = most.load(std::memory_order_relaxed);
    while (before < value && !most.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
    }
}

// Bytes of a matrix as it lies in a GGUF file. Throws std::invalid_argument unless `columns` is a positive multiple of
// the block, and for more than 2^48 weights, so that no size computed from these wraps round.
size_t matrix_bytes(Quant quant, size_t rows, size_t columns);

// Packs rows 16 * panel .. of `matrix` (zeros beyond its end) to panel_bytes() bytes at `out`.
// Returns a number that no weight of a block format in the panel exceeds in size, nor what it is computed from, code
// times scale and minimum; 0 for floats.
// Throws std::invalid_argument naming the row where a scale, or a weight that is a float, is not finite.
float pack_panel(const StoredMatrix& matrix, size_t panel, uint8_t* out);

}  // namespace ktqueue
