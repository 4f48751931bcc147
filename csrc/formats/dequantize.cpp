// Converts GGUF blocks to floats, in plain C++, block by block as formats/row_block.h reads them. Products are computed
// from left to right as in formats/quant_format.h, so the values equal those of the `gguf` package bit for bit.
#include <cmath>
#include <cstring>

#include "formats/grid_block.h"
#include "formats/half.h"
#include "formats/row_block.h"

namespace ktqueue {

namespace {

constexpr size_t kRun = 16;  // consecutive weights with the same step and offset

struct Run {
    float step, offset;
};

inline float power_of_two(uint8_t e) {  // 2^(e - 128), as bits; the two smallest are subnormal
    const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1u) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return power;
}

// The step and offset of run `k` of a block.
template <Quant kQuant>
inline Run run_of(const RowBlock& block, size_t k) {
    const size_t slab = k / 2;
    const auto half_of_slab = [&](size_t s) { return half_to_float(block.scales + 2 * s); };
    const auto signed_scale = [&](size_t i) { return static_cast<float>(static_cast<int8_t>(block.scales[i])); };
    switch (kQuant) {
        case Quant::Q2_K:
            return {half_to_float(block.d) * static_cast<float>(block.scales[k] & 15),
                    half_to_float(block.dmin) * static_cast<float>(block.scales[k] >> 4)};
        case Quant::Q4_K:
        case Quant::Q5_K:
            return {half_to_float(block.d) * block.scales[slab], half_to_float(block.dmin) * block.minimums[slab]};
        case Quant::Q3_K:
        case Quant::Q6_K:
            return {half_to_float(block.d) * signed_scale(k), 0};
        case Quant::IQ4_XS:
            return {half_to_float(block.d) * signed_scale(slab), 0};
        case Quant::Q4_1:
        case Quant::Q5_1:
            return {half_of_slab(slab), -half_of_slab(kSlabs + slab)};
        case Quant::MXFP4:
            return {power_of_two(block.scales[slab]), 0};
        case Quant::NVFP4:
            return {0.5f * e4m3_to_float(block.scales[k]), 0};
        case Quant::FP4: {
            const float scale = 0.5f * e4m3_to_float(block.scales[k]);
            return {std::fma(scale, block.factor, scale * block.rest), 0};
        }
        case Quant::FP8: {
            float d;
            std::memcpy(&d, block.scales, 4);
            return {d, 0};
        }
        default:
            return {half_of_slab(slab), 0};
    }
}

constexpr bool has_table(Quant quant) {
    return quant == Quant::IQ4_NL || quant == Quant::IQ4_XS || quant == Quant::MXFP4 || quant == Quant::NVFP4 ||
           quant == Quant::FP4;
}

// The value of a code of run `k`, in steps.
template <Quant kQuant>
inline float value_of(const RowBlock& block, size_t k, uint8_t code) {
    switch (kQuant) {
        case Quant::IQ4_NL:
        case Quant::IQ4_XS:
            return kIQ4Values[code];
        case Quant::MXFP4:
        case Quant::NVFP4:
        case Quant::FP4:
            return kMXFP4Values[code];
        case Quant::FP8:
            return e4m3_to_float(code);
        case Quant::UINT4:
            return static_cast<float>(code - block.minimums[k / 2]);
        default: {
            constexpr int kZero = kQuant == Quant::Q3_K   ? 4
                                  : kQuant == Quant::Q4_0 ? 8
                                  : kQuant == Quant::Q6_K ? 32
                                  : kQuant == Quant::Q8_0 ? 128
                                                          : 0;
            return static_cast<float>(code - kZero);
        }
    }
}

template <Quant kQuant>
void dequantize(const uint8_t* data, size_t count, float* target) {
    const QuantFormat& format = quant_format(kQuant);
    RowBlock block;
    for (; count; count -= format.block_weights, data += format.block_bytes) {
        read_block(kQuant, data, format.block_weights / kSlab, block);
        for (size_t k = 0; k < format.block_weights / kRun; ++k, target += kRun) {
            const Run run = run_of<kQuant>(block, k);
            const uint8_t* codes = block.codes + kRun * k;
            if constexpr (has_table(kQuant)) {  // scaling the table takes less time than converting each value
                float weights[16];
                for (uint8_t code = 0; code < 16; ++code) weights[code] = run.step * value_of<kQuant>(block, k, code);
                for (size_t i = 0; i < kRun; ++i) target[i] = weights[codes[i]];
            } else {
                float values[kRun];
                for (size_t i = 0; i < kRun; ++i) values[i] = value_of<kQuant>(block, k, codes[i]);
                for (size_t i = 0; i < kRun; ++i) target[i] = run.step * values[i] - run.offset;
            }
        }
    }
}

template <Quant kQuant>
void dequantize_grid(const uint8_t* data, size_t count, float* target) {
    const QuantFormat& format = quant_format(kQuant);
    GridBlock block;
    for (; count; count -= format.block_weights, data += format.block_bytes, target += format.block_weights) {
        read_grid_block(kQuant, data, block);
        const float step = half_to_float(block.d) * grid_unit(kQuant);
        for (size_t i = 0; i < format.block_weights; ++i)
            target[i] = step * block.scales[i / 16] * static_cast<float>(block.values[i]);
    }
}

void copy_floats(const uint8_t* data, size_t count, float* target) {
    std::memcpy(target, data, count * sizeof(float));
}

void widen_halves(const uint8_t* data, size_t count, float* target) {
    for (size_t i = 0; i < count; ++i) target[i] = half_to_float(data + 2 * i);
}

void widen_bf16(const uint8_t* data, size_t count, float* target) {
    for (size_t i = 0; i < count; ++i) {
        uint16_t upper;
        std::memcpy(&upper, data + 2 * i, 2);
        const uint32_t bits = static_cast<uint32_t>(upper) << 16;
        std::memcpy(target + i, &bits, 4);
    }
}

constexpr DequantizeKernel kKernels[kQuantCount] = {
    copy_floats,
    widen_halves,
    widen_bf16,
    dequantize<Quant::Q4_0>,
    dequantize<Quant::Q8_0>,
    dequantize<Quant::Q2_K>,
    dequantize<Quant::Q3_K>,
    dequantize<Quant::Q4_K>,
    dequantize<Quant::Q5_K>,
    dequantize<Quant::Q6_K>,
    dequantize<Quant::IQ4_NL>,
    dequantize<Quant::IQ4_XS>,
    dequantize<Quant::MXFP4>,
    dequantize_grid<Quant::IQ2_XXS>,
    dequantize_grid<Quant::IQ2_XS>,
    dequantize_grid<Quant::IQ2_S>,
    dequantize_grid<Quant::IQ3_XXS>,
    dequantize_grid<Quant::IQ3_S>,
    dequantize_grid<Quant::IQ1_S>,
    dequantize_grid<Quant::IQ1_M>,
    dequantize<Quant::NVFP4>,
    dequantize<Quant::Q4_1>,
    dequantize<Quant::Q5_1>,
    dequantize<Quant::UINT4>,
    dequantize<Quant::FP8>,
    dequantize<Quant::FP4>,
};

}  // namespace

DequantizeKernel dequantize_kernel(Quant quant) {
    return kKernels[static_cast<size_t>(quant)];
}

}  // namespace ktqueue
