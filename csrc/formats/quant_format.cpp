#include "formats/quant_format.h"

#include <stdexcept>

namespace ktqueue {

namespace {

constexpr QuantFormat kFormats[kQuantCount] = {
    {"F32", 1, 4},      {"F16", 1, 2},        {"BF16", 1, 2},      {"Q4_0", 32, 18},     {"Q8_0", 32, 34},
    {"Q2_K", 256, 84},  {"Q3_K", 256, 110},   {"Q4_K", 256, 144},  {"Q5_K", 256, 176},   {"Q6_K", 256, 210},
    {"IQ4_NL", 32, 18}, {"IQ4_XS", 256, 136}, {"MXFP4", 32, 17},   {"IQ2_XXS", 256, 66}, {"IQ2_XS", 256, 74},
    {"IQ2_S", 256, 82}, {"IQ3_XXS", 256, 98}, {"IQ3_S", 256, 110}, {"IQ1_S", 256, 50},   {"IQ1_M", 256, 56},
    {"NVFP4", 64, 36},  {"Q4_1", 32, 20},     {"Q5_1", 32, 24},    {"UINT4", 32, 19},    {"FP8", 128, 132},
    {"FP4", 64, 44},
};

}  // namespace

const QuantFormat& quant_format(Quant quant) {
    return kFormats[static_cast<size_t>(quant)];
}

Quant parse_quant(std::string_view name) {
    std::string message = "quant must be one of ";
    for (size_t i = 0; i < kQuantCount; ++i) {
        if (name == kFormats[i].name) return static_cast<Quant>(i);
        if (i) message += ", ";
        message += kFormats[i].name;
    }
    throw std::invalid_argument(message.append(", got '").append(name).append("'"));
}

size_t row_bytes(Quant quant, size_t columns) {
    const QuantFormat& format = quant_format(quant);
    if (columns == 0 || columns % format.block_weights != 0)
        throw std::invalid_argument("row length must be a positive multiple of " +
                                    std::to_string(format.block_weights) + " weights for " + format.name + ", got " +
                                    std::to_string(columns));
    return columns / format.block_weights * format.block_bytes;
}

}  // namespace ktqueue
