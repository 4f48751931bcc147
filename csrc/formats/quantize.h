// Quantises floats to GGUF blocks by weighted least squares. Layouts: formats/quant_format.h, and of Q5_0:
//
//   Q5_0      32      22    0: half d, 2: u32 h, 6: u8 q[16]                       d * (five - 16), bits as in Q5_1
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ktqueue {

struct Quantizer {
    const char* name;
    size_t block_weights;
    size_t block_bytes;

    // Packs a block. `weights`, all above 0, say how much the squared error of each value counts.
    void (*pack)(const float* values, const float* weights, uint8_t* block);
};

// Throws std::invalid_argument with a list of the known names.
const Quantizer& find_quantizer(std::string_view name);

// Packs [rows, columns] values into [rows, bytes of a row] on the shared pool. A row's bytes depend on that row only, so
// they are the same for any number of threads. `importance`: [columns] or null, the mean squares of the activations
// that the columns are multiplied by; only their ratios matter, and nothing but zeros is the same as null.
//
// The weight of a squared error is importance * sqrt(2 * mean square of the row + value^2). Large values count more
// because they are often outliers that matter. (llama.cpp weights so, by superblock, when it has an importance matrix:
// ggml-quants.c.)
//
// Throws std::invalid_argument unless all values are between -kMostMagnitude and kMostMagnitude.
void quantize(const Quantizer& quantizer, const float* values, size_t rows, size_t columns, const float* importance,
              uint8_t* target);

inline constexpr float kMostMagnitude = 65504;  // of values: the largest half, since scales are halves

}  // namespace ktqueue
