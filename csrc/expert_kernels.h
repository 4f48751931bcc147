// Dot products of quantised rows with fp32 activations, for any decoder and any vector type.
// Included only by translation units of one instruction set, after a quant_decode header; internal linkage.
//
// One pass over a weight row serves up to four tokens: a group of 32 weights is decoded into four vectors and each is
// multiplied into every token's sums. Per (row, token) there are two accumulators, even and odd vectors of each group,
// added at the end; the order does not depend on how many rows and tokens share the pass.
#pragma once

#include "kernel_table.h"

namespace ktqueue {
namespace {

template <class Decoder, size_t Rows, size_t Tokens>
inline void accumulate(const Decoder* decoder, size_t group, const float* const* x, size_t column,
                       Vector8 (&sums)[Rows][Tokens][2]) {
    for (size_t r = 0; r < Rows; ++r) {
        Vector8 w[4];
        decoder[r].decode(group, w);
        for (size_t i = 0; i < 4; ++i)
            for (size_t t = 0; t < Tokens; ++t)
                sums[r][t][i % 2] = multiply_add(w[i], load(x[t] + column + 8 * i), sums[r][t][i % 2]);
    }
}

template <class Decoder, size_t Rows, size_t Tokens>
inline void dot_tile(const uint8_t* weights, size_t stride, size_t columns, const float* const* x, float* y,
                     size_t y_stride) {
    Vector8 sums[Rows][Tokens][2];
    for (size_t r = 0; r < Rows; ++r)
        for (size_t t = 0; t < Tokens; ++t) sums[r][t][0] = sums[r][t][1] = zero();
    const size_t blocks = columns / Decoder::kBlock;
    for (size_t b = 0; b < blocks; ++b) {
        Decoder decoder[Rows] = {};
        for (size_t r = 0; r < Rows; ++r) decoder[r] = Decoder(weights + r * stride + b * Decoder::kBytes);
#pragma GCC unroll 8
        for (size_t g = 0; g < Decoder::kBlock / kGroup; ++g)
            accumulate<Decoder, Rows, Tokens>(decoder, g, x, b * Decoder::kBlock + g * kGroup, sums);
    }
    if (const size_t rest = columns % Decoder::kBlock) {  // only the unquantised formats
        uint8_t padded[Rows][Decoder::kBytes] = {};
        Decoder decoder[Rows] = {};
        for (size_t r = 0; r < Rows; ++r) {
            std::memcpy(padded[r], weights + r * stride + blocks * Decoder::kBytes,
                        rest * (Decoder::kBytes / Decoder::kBlock));
            decoder[r] = Decoder(padded[r]);
        }
        accumulate<Decoder, Rows, Tokens>(decoder, 0, x, blocks * Decoder::kBlock, sums);
    }
    for (size_t r = 0; r < Rows; ++r)
        for (size_t t = 0; t < Tokens; ++t) y[t * y_stride + r] = sum(add(sums[r][t][0], sums[r][t][1]));
}

template <class Decoder, size_t Rows, size_t Tokens>
inline void dot_rows(const uint8_t* weights, size_t stride, size_t rows, size_t columns, const float* const* x,
                     float* y, size_t y_stride) {
    size_t r = 0;
    for (; r + Rows <= rows; r += Rows)
        dot_tile<Decoder, Rows, Tokens>(weights + r * stride, stride, columns, x, y + r, y_stride);
    for (; r < rows; ++r) dot_tile<Decoder, 1, Tokens>(weights + r * stride, stride, columns, x, y + r, y_stride);
}

template <class Decoder>
void matrix(const uint8_t* weights, size_t rows, size_t columns, const float* const* x, size_t tokens, float* y,
            size_t y_stride) {
    // For a row that ends inside a 32-weight block the bytes per weight are whole (F32, F16, BF16).
    const size_t stride =
        columns / Decoder::kBlock * Decoder::kBytes + columns % Decoder::kBlock * (Decoder::kBytes / Decoder::kBlock);
    size_t t = 0;
    for (; t + 4 <= tokens; t += 4)
        dot_rows<Decoder, 1, 4>(weights, stride, rows, columns, x + t, y + t * y_stride, y_stride);
    const float* const* rest = x + t;
    float* rest_y = y + t * y_stride;
    if (tokens - t == 3) dot_rows<Decoder, 1, 3>(weights, stride, rows, columns, rest, rest_y, y_stride);
    if (tokens - t == 2) dot_rows<Decoder, 2, 2>(weights, stride, rows, columns, rest, rest_y, y_stride);
    if (tokens - t == 1) dot_rows<Decoder, 4, 1>(weights, stride, rows, columns, rest, rest_y, y_stride);
}

template <class Decoder>
void dequantize(const uint8_t* data, size_t count, float* target) {
    for (; count >= Decoder::kBlock; count -= Decoder::kBlock, data += Decoder::kBytes) {
        const Decoder decoder(data);
        for (size_t g = 0; g < Decoder::kBlock / kGroup; ++g, target += kGroup) {
            Vector8 w[4];
            decoder.decode(g, w);
            for (size_t i = 0; i < 4; ++i) store(target + 8 * i, w[i]);
        }
    }
    if (count) {
        uint8_t padded[Decoder::kBytes] = {};
        std::memcpy(padded, data, count * (Decoder::kBytes / Decoder::kBlock));
        float values[Decoder::kBlock];
        dequantize<Decoder>(padded, Decoder::kBlock, values);
        std::memcpy(target, values, count * sizeof(float));
    }
}

inline void silu_gate(float* gate, const float* up, size_t count) {
    for (size_t i = 0; i < count; i += 8) {
        const Vector8 g = load(gate + i);
        const Vector8 denominator = add(splat(1.0f), exponential(subtract(zero(), g)));
        store(gate + i, multiply(divide(g, denominator), load(up + i)));
    }
}

}  // namespace
}  // namespace ktqueue
