#include "matrices.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "kernels/kernel_table.h"

namespace ktqueue {

namespace {

// The offsets of a block's halves; -1: the block has fewer.
void half_offsets(Quant quant, int (&offsets)[2]) {
    offsets[0] = 0;
    offsets[1] = -1;
    if (quant == Quant::Q2_K) offsets[0] = 80, offsets[1] = 82;
    if (quant == Quant::Q3_K) offsets[0] = 108;
    if (quant == Quant::Q4_K || quant == Quant::Q5_K || quant == Quant::Q4_1 || quant == Quant::Q5_1) offsets[1] = 2;
    if (quant == Quant::Q6_K) offsets[0] = 208;
}

// The half of IQ1_M is in the upper four bits of four words.
uint16_t get_half(Quant quant, const uint8_t* block, int offset) {
    uint16_t half = 0;
    if (quant != Quant::IQ1_M) std::memcpy(&half, block + offset, 2);
    for (int i = 0; quant == Quant::IQ1_M && i < 4; ++i) half |= static_cast<uint16_t>(block[49 + 2 * i] >> 4 << 4 * i);
    return half;
}

void put_half(Quant quant, uint8_t* block, int offset, uint16_t half) {
    if (quant != Quant::IQ1_M) std::memcpy(block + offset, &half, 2);
    for (int i = 0; quant == Quant::IQ1_M && i < 4; ++i)
        block[49 + 2 * i] = static_cast<uint8_t>((block[49 + 2 * i] & 15) | (half >> 4 * i & 15) << 4);
}

// A half of 2^-10 to 2^-5 with either sign.
uint16_t small_half(Random& random) {
    return static_cast<uint16_t>(random.number(0, 1) << 15 | random.number(5, 9) << 10 | random.number(0, 1023));
}

constexpr uint16_t kHalfInfinity = 0x7c00;

enum class Scales { small, any, any_finite, one_bad };

void set_block(Random& random, Quant quant, Scales scales, uint8_t* block) {
    if (quant == Quant::MXFP4) {
        if (scales == Scales::small || scales == Scales::one_bad)
            block[0] = static_cast<uint8_t>(random.number(118, 126));
        if (scales == Scales::any_finite && block[0] == 255) block[0] = 254;
        return;
    }
    if (quant == Quant::NVFP4) {
        for (int k = 0; k < 4 && scales != Scales::any; ++k) block[k] &= 63;
        return;
    }
    if (quant == Quant::FP4) {
        for (int k = 8; k < 12 && scales != Scales::any; ++k) block[k] &= 63;
        return;
    }
    if (quant == Quant::FP8 && scales != Scales::any)
        for (size_t i = 4; i < 132; ++i)
            if ((block[i] & 0x7f) == 0x7f) block[i] = 0x7e;
    if (quant == Quant::F32 || quant == Quant::FP8) {
        uint32_t bits;
        std::memcpy(&bits, block, 4);
        const float value = (quant == Quant::FP8 ? 0.001f : 0.1f) * random.normal();
        if (scales == Scales::small || scales == Scales::one_bad) std::memcpy(&bits, &value, 4);
        if (scales == Scales::any_finite) bits &= ~0x00800000u;  // not all ones in the exponent
        std::memcpy(block, &bits, 4);
        return;
    }
    if (quant == Quant::BF16) {
        const float value = 0.1f * random.normal();
        if (scales == Scales::small || scales == Scales::one_bad)
            std::memcpy(block, reinterpret_cast<const uint8_t*>(&value) + 2, 2);
        if (scales == Scales::any_finite) block[0] &= 0x7f;
        return;
    }
    int offsets[2];
    half_offsets(quant, offsets);
    for (const int offset : offsets) {
        if (offset < 0) continue;
        uint16_t half = get_half(quant, block, offset);
        if (scales == Scales::small || scales == Scales::one_bad) half = small_half(random);
        if (scales == Scales::any_finite) half &= static_cast<uint16_t>(~0x0400u);
        put_half(quant, block, offset, half);
    }
}

void make_bad(Random& random, Quant quant, uint8_t* block) {
    if (quant == Quant::MXFP4) {
        block[0] = 255;
    } else if (quant == Quant::FP4) {
        block[random.number(8, 11)] = 127;
    } else if (quant == Quant::F32 || quant == Quant::BF16 || quant == Quant::FP8) {
        const float values[] = {INFINITY, -INFINITY, NAN};
        const float value = random.element(values);
        const size_t bytes = quant == Quant::BF16 ? 2 : 4;
        std::memcpy(block, reinterpret_cast<const uint8_t*>(&value) + 4 - bytes, bytes);
    } else if (quant != Quant::NVFP4) {  // which has no scale that is not finite
        int offsets[2];
        half_offsets(quant, offsets);
        const int offset = offsets[1] >= 0 && random.chance(2) ? offsets[1] : offsets[0];
        const auto half = static_cast<uint16_t>(kHalfInfinity | random.number(0, 63) << 10 | random.number(0, 1023));
        put_half(quant, block, offset, half);
    }
}

bool is_bad(Quant quant, const uint8_t* block) {
    if (quant == Quant::MXFP4) return block[0] == 255;
    if (quant == Quant::NVFP4) return false;
    if (quant == Quant::FP4)
        return std::any_of(block + 8, block + 12, [](uint8_t scale) { return (scale & 0x7f) == 0x7f; });
    if (quant == Quant::FP8)
        for (size_t i = 4; i < 132; ++i)
            if ((block[i] & 0x7f) == 0x7f) return true;
    if (quant == Quant::F32 || quant == Quant::BF16 || quant == Quant::FP8) {
        uint32_t bits = 0;
        const size_t bytes = quant == Quant::BF16 ? 2 : 4;
        std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 4 - bytes, block, bytes);
        return (bits & 0x7f800000u) == 0x7f800000u;
    }
    int offsets[2];
    half_offsets(quant, offsets);
    for (const int offset : offsets) {
        if (offset < 0) continue;
        if ((get_half(quant, block, offset) & kHalfInfinity) == kHalfInfinity) return true;
    }
    return false;
}

}  // namespace

Matrix::Matrix(Random& random, Quant quant, size_t rows, size_t columns)
    : quant_(quant), rows_(rows), columns_(columns), data_(random, rows * row_bytes(quant, columns)) {
    fill(random);
    weights_.resize(rows * columns);
    if (rows > 0) dequantize_kernel(quant)(data_.data(), rows * columns, weights_.data());
    for (const float weight : weights_)
        if (std::isfinite(weight)) largest_ = std::max<double>(largest_, std::fabs(weight));
}

void Matrix::fill(Random& random) {
    for (uint8_t& byte : data_) byte = static_cast<uint8_t>(random.number(0, 255));
    const Scales rare[] = {Scales::any, Scales::any_finite, Scales::any_finite, Scales::one_bad};
    const Scales scales = random.chance(5) ? random.element(rare) : Scales::small;
    const size_t bytes = quant_format(quant_).block_bytes, blocks = data_.size() / bytes;
    for (size_t i = 0; i < blocks; ++i) set_block(random, quant_, scales, data_.data() + i * bytes);
    if (blocks == 0) return;
    for (size_t i = 0; quant_ == Quant::FP4 && i < blocks; ++i) {  // all blocks of a row have the same factors
        const float d = 0.0001f * static_cast<float>(1 + i / (blocks / rows_) % 7), factors[2] = {d, d * 0x1p-7f};
        std::memcpy(data_.data() + i * bytes, factors, sizeof(factors));
    }
    if (scales == Scales::one_bad) make_bad(random, quant_, data_.data() + random.number(0, blocks - 1) * bytes);
    for (size_t i = 0; i < blocks; ++i)
        if (is_bad(quant_, data_.data() + i * bytes)) bad_rows_.insert(i / (blocks / rows_));
}

Matrix::Product Matrix::times(size_t row, const std::vector<double>& x) const {
    Product product{0, 0, 0, 0};
    const float* weights = weights_.data() + row * columns_;
    for (size_t begin = 0; begin < columns_; begin += kSuperblock) {
        const size_t end = std::min(columns_, begin + kSuperblock);
        double largest = 0, sum = 0, squares = 0;
        for (size_t c = begin; c < end; ++c) {
            product.value += weights[c] * x[c];
            // The largest weight of a superblock stands for all of them, because a scale times a code may exceed its
            // difference to a minimum.
            largest = std::max(largest, std::fabs(static_cast<double>(weights[c])));
            sum += std::fabs(x[c]);
            squares += x[c] * x[c];
        }
        product.size += (largest + 0x1p-7 * largest_) * sum;
        product.root += largest * largest * squares;
        product.sum += sum;
    }
    product.root = std::sqrt(product.root);
    return product;
}

std::vector<Quant> random_quants(Random& random, size_t count) {
    std::vector<Quant> quants;
    const auto first = static_cast<Quant>(random.number(0, kQuantCount - 1));
    for (size_t i = 0; i < count; ++i)
        quants.push_back(random.chance(2) ? first : static_cast<Quant>(random.number(0, kQuantCount - 1)));
    return quants;
}

size_t random_columns(Random& random, const std::vector<Quant>& quants, size_t most) {
    size_t block = 1;
    for (const Quant quant : quants) block = std::max(block, quant_format(quant).block_weights);
    return block * random.number(1, std::max<size_t>(1, random.chance(2) ? most / block : most / block / 4));
}

std::vector<double> seen(const float* x, size_t columns, Quant quant, Precision precision) {
    std::vector<double> result(x, x + columns);
    if (takes_floats(quant) || precision == Precision::Exact) return result;
    for (size_t begin = 0; begin < columns; begin += kSlab) {
        const size_t end = std::min(columns, begin + kSlab);
        float largest = 0;
        bool finite = true;
        for (size_t c = begin; c < end; ++c) {
            finite = finite && std::isfinite(x[c]);
            largest = std::max(largest, std::fabs(x[c]));
        }
        for (size_t c = begin; c < end; ++c) {
            const float scale = largest / 127.0f, inverse = 127.0f / largest;
            if (!finite)
                result[c] = std::numeric_limits<double>::quiet_NaN();
            else if (largest < 1e-30f)
                result[c] = 0;
            else
                result[c] = static_cast<double>(scale) * std::nearbyint(x[c] * inverse);
        }
    }
    return result;
}

bool names_a_bad_row(const std::string& error, const Matrix& matrix) {
    const size_t at = error.find("row ");
    if (at == std::string::npos) return false;
    size_t row = 0;
    int length = 0;
    if (std::sscanf(error.c_str() + at, "row %zu has a scale or weight that is not finite%n", &row, &length) != 1)
        return false;
    return length > 0 && at + static_cast<size_t>(length) == error.size() && matrix.bad_rows().contains(row);
}

}  // namespace ktqueue
