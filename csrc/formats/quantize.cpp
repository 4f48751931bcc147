// Packs blocks of each format, with the scales and codes of formats/fit_blocks.h.
#include "formats/quantize.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "formats/fit_blocks.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

// Puts the nibbles of 32 codes into 16 bytes, the first 16 codes into the low ones.
inline void pack_nibbles(const uint8_t* codes, uint8_t* q) {
    for (int i = 0; i < 16; ++i) q[i] = static_cast<uint8_t>((codes[i] & 15) | (codes[i + 16] & 15) << 4);
}

// Bit 4 of 32 codes, as one number.
inline void pack_fifth_bits(const uint8_t* codes, uint8_t* h) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(codes[i] >> 4) << i;
    std::memcpy(h, &bits, 4);
}

template <class Codes>
void pack_step(const float* x, const float* w, uint8_t* block) {
    uint8_t codes[32];
    const float d = as_half(fit_step<Codes, 32>(x, w));
    encode<Codes, 32>(x, d, 0, codes);
    store_half(block, d);
    if constexpr (Codes::kHigh == 127) {
        for (int i = 0; i < 32; ++i) block[2 + i] = static_cast<uint8_t>(codes[i] - 127);
    } else if constexpr (Codes::kHigh == 15) {
        pack_fifth_bits(codes, block + 2);
        pack_nibbles(codes, block + 6);
    } else {
        pack_nibbles(codes, block + 2);
    }
}

template <class Codes>
void pack_step_and_minimum(const float* x, const float* w, uint8_t* block) {
    uint8_t codes[32];
    const StepAndOffset fit = fit_step_and_offset<Codes, 32, true>(x, w);
    const float d = as_half(fit.step), m = as_half(-fit.offset);
    encode<Codes, 32>(x, d, -m, codes);
    store_half(block, d);
    store_half(block + 2, m);
    if constexpr (Codes::kHigh == 31) pack_fifth_bits(codes, block + 4);
    pack_nibbles(codes, block + (Codes::kHigh == 31 ? 8 : 4));
}

void pack_q2_k(const float* x, const float* w, uint8_t* block) {
    using Codes = Steps<0, 3>;
    const auto fit = fit_offset_superblock<Codes, 16, 15>(x, w);
    uint8_t codes[kSuperblock];
    for (size_t part = 0; part < 16; ++part) {
        block[part] = static_cast<uint8_t>(fit.scales[part] | fit.mins[part] << 4);
        encode<Codes, 16>(x + 16 * part, fit.d * static_cast<float>(fit.scales[part]),
                          fit.m * static_cast<float>(fit.mins[part]), codes + 16 * part);
    }
    for (size_t i = 0; i < 64; ++i) {
        const uint8_t* first = codes + i / 32 * 128 + i % 32;
        block[16 + i] = static_cast<uint8_t>(first[0] | first[32] << 2 | first[64] << 4 | first[96] << 6);
    }
    store_half(block + 80, fit.d);
    store_half(block + 82, fit.m);
}

void pack_q3_k(const float* x, const float* w, uint8_t* block) {
    using Codes = Steps<-4, 3>;
    const auto fit = fit_superblock<Codes, 16, -32, 31>(x, w);
    uint8_t codes[kSuperblock];
    std::memset(block, 0, 110);
    for (size_t part = 0; part < 16; ++part) {
        const int scale = fit.scales[part] + 32;
        block[96 + part % 8] |= static_cast<uint8_t>((scale & 15) << (part < 8 ? 0 : 4));
        block[104 + part % 4] |= static_cast<uint8_t>(scale >> 4 << (2 * (part / 4)));
        encode<Codes, 16>(x + 16 * part, fit.d * static_cast<float>(fit.scales[part]), 0, codes + 16 * part);
    }
    for (size_t i = 0; i < kSuperblock; ++i) {
        block[32 + i / 128 * 32 + i % 32] |= static_cast<uint8_t>((codes[i] & 3) << (i / 32 % 4 * 2));
        block[i % 32] |= static_cast<uint8_t>(codes[i] >> 2 << (i / 32));
    }
    store_half(block + 108, fit.d);
}

// Q4_K and Q5_K.
template <class Codes>
void pack_k(const float* x, const float* w, uint8_t* block) {
    constexpr bool kFive = Codes::kHigh == 31;
    const auto fit = fit_offset_superblock<Codes, 32, 63>(x, w);
    store_half(block, fit.d);
    store_half(block + 2, fit.m);
    uint8_t* s = block + 4;
    for (size_t g = 0; g < 4; ++g) {
        const int scale = fit.scales[g + 4], min = fit.mins[g + 4];
        s[g] = static_cast<uint8_t>(fit.scales[g] | scale >> 4 << 6);
        s[g + 4] = static_cast<uint8_t>(fit.mins[g] | min >> 4 << 6);
        s[g + 8] = static_cast<uint8_t>((scale & 15) | (min & 15) << 4);
    }
    uint8_t *high = block + 16, *q = block + (kFive ? 48 : 16);
    std::memset(high, 0, kFive ? 160 : 128);
    for (size_t g = 0; g < 8; ++g) {
        uint8_t codes[32];
        encode<Codes, 32>(x + 32 * g, fit.d * static_cast<float>(fit.scales[g]),
                          fit.m * static_cast<float>(fit.mins[g]), codes);
        for (size_t i = 0; i < 32; ++i) {
            q[g / 2 * 32 + i] |= static_cast<uint8_t>((codes[i] & 15) << (g % 2 * 4));
            if constexpr (kFive) high[i] |= static_cast<uint8_t>(codes[i] >> 4 << g);
        }
    }
}

void pack_q6_k(const float* x, const float* w, uint8_t* block) {
    using Codes = Steps<-32, 31>;
    const auto fit = fit_superblock<Codes, 16, -128, 127>(x, w);
    uint8_t codes[kSuperblock];
    std::memset(block, 0, 192);
    for (size_t part = 0; part < 16; ++part) {
        block[192 + part] = static_cast<uint8_t>(fit.scales[part]);
        encode<Codes, 16>(x + 16 * part, fit.d * static_cast<float>(fit.scales[part]), 0, codes + 16 * part);
    }
    for (size_t i = 0; i < kSuperblock; ++i) {
        const size_t half = i / 128, group = i / 32 % 4, j = i % 32;
        block[64 * half + 32 * (group % 2) + j] |= static_cast<uint8_t>((codes[i] & 15) << (group / 2 * 4));
        block[128 + 32 * half + j] |= static_cast<uint8_t>(codes[i] >> 4 << (2 * group));
    }
    store_half(block + 208, fit.d);
}

void pack_iq4_xs(const float* x, const float* w, uint8_t* block) {
    const auto fit = fit_superblock<Iq4Values, 32, -32, 31>(x, w);
    store_half(block, fit.d);
    std::memset(block + 2, 0, 6);
    unsigned high = 0;
    for (size_t g = 0; g < 8; ++g) {
        const int scale = fit.scales[g] + 32;
        block[4 + g / 2] |= static_cast<uint8_t>((scale & 15) << (g % 2 * 4));
        high |= static_cast<unsigned>(scale >> 4) << (2 * g);
        uint8_t codes[32];
        encode<Iq4Values, 32>(x + 32 * g, fit.d * static_cast<float>(fit.scales[g]), 0, codes);
        pack_nibbles(codes, block + 8 + 16 * g);
    }
    block[2] = static_cast<uint8_t>(high);
    block[3] = static_cast<uint8_t>(high >> 8);
}

// Tries the scale of the OCP microscaling specification, for which 4 to 8 times the scale holds the largest value, and
// its neighbours.
void pack_mxfp4(const float* x, const float* w, uint8_t* block) {
    float most = 0;
    for (int i = 0; i < 32; ++i) most = std::max(most, std::fabs(x[i]));
    const int middle = most > 0 ? std::ilogb(most) - 2 + 127 : 0;
    double best = std::numeric_limits<double>::infinity();
    for (int e = std::max(0, middle - 1); e <= std::max(0, middle + 1); ++e) {
        const float step = std::ldexp(1.0f, e - 128);
        uint8_t codes[32];
        double error = 0;
        for (int i = 0; i < 32; ++i) {
            const float magnitude = std::fabs(x[i]) / step;
            int code = 0;
            while (code < 7 && magnitude > static_cast<float>(kMXFP4Values[code] + kMXFP4Values[code + 1]) / 2) ++code;
            const double miss = std::fabs(x[i]) - step * static_cast<float>(kMXFP4Values[code]);
            error += w[i] * miss * miss;
            codes[i] = static_cast<uint8_t>(code | (code && x[i] < 0 ? 8 : 0));
        }
        if (error >= best) continue;
        best = error;
        block[0] = static_cast<uint8_t>(e);
        pack_nibbles(codes, block + 1);
    }
}

constexpr Quantizer kQuantizers[] = {
    {"Q4_0", 32, 18, pack_step<Steps<-8, 7>>},
    {"Q5_0", 32, 22, pack_step<Steps<-16, 15>>},
    {"Q8_0", 32, 34, pack_step<Steps<-127, 127>>},
    {"IQ4_NL", 32, 18, pack_step<Iq4Values>},
    {"Q4_1", 32, 20, pack_step_and_minimum<Steps<0, 15>>},
    {"Q5_1", 32, 24, pack_step_and_minimum<Steps<0, 31>>},
    {"MXFP4", 32, 17, pack_mxfp4},
    {"Q2_K", 256, 84, pack_q2_k},
    {"Q3_K", 256, 110, pack_q3_k},
    {"Q4_K", 256, 144, pack_k<Steps<0, 15>>},
    {"Q5_K", 256, 176, pack_k<Steps<0, 31>>},
    {"Q6_K", 256, 210, pack_q6_k},
    {"IQ4_XS", 256, 136, pack_iq4_xs},
};

constexpr float kLeastImportance = 1e-5f;  // of a column, as a share of the mean: no error is free

// Importance divided by its mean; ones if there is none.
std::vector<float> relative_importance(const float* importance, size_t columns) {
    std::vector<float> relative(columns, 1.0f);
    double sum = 0;
    for (size_t i = 0; importance && i < columns; ++i) {
        if (!(importance[i] >= 0) || std::isinf(importance[i]))
            throw std::invalid_argument("importance of column " + std::to_string(i) +
                                        " must be finite and not below 0");
        sum += importance[i];
    }
    const double mean = sum / static_cast<double>(columns);
    if (mean > 0)
        for (size_t i = 0; i < columns; ++i)
            relative[i] = std::max(kLeastImportance, static_cast<float>(importance[i] / mean));
    return relative;
}

// The weights of the squared errors of a row: see quantize.
void row_weights(const float* values, const std::vector<float>& importance, std::vector<float>& weights) {
    double square = 0;
    for (size_t i = 0; i < importance.size(); ++i) square += static_cast<double>(values[i]) * values[i];
    const double mean = std::sqrt(square / static_cast<double>(importance.size()));
    const float inverse = mean > 1e-30 ? static_cast<float>(1 / mean) : 0;
    for (size_t i = 0; i < importance.size(); ++i) {
        const float relative = values[i] * inverse;
        weights[i] = importance[i] * std::sqrt(2 + relative * relative);
    }
}

}  // namespace

const Quantizer& find_quantizer(std::string_view name) {
    std::string message = "quant must be one of ";
    for (const Quantizer& quantizer : kQuantizers) {
        if (name == quantizer.name) return quantizer;
        message.append(&quantizer == kQuantizers ? "" : ", ").append(quantizer.name);
    }
    throw std::invalid_argument(message.append(", got '").append(name).append("'"));
}

void quantize(const Quantizer& quantizer, const float* values, size_t rows, size_t columns, const float* importance,
              uint8_t* target) {
    const std::vector<float> relative = relative_importance(importance, columns);
    const size_t blocks = columns / quantizer.block_weights;
    shared_pool()->for_each(rows, [&](size_t row) {
        const float* x = values + row * columns;
        for (size_t i = 0; i < columns; ++i)
            if (!(std::fabs(x[i]) <= kMostMagnitude))
                throw std::invalid_argument("the value in row " + std::to_string(row) + ", column " +
                                            std::to_string(i) + " is not a number, or its magnitude is above 65504");
        std::vector<float> weights(columns);
        row_weights(x, relative, weights);
        for (size_t block = 0; block < blocks; ++block)
            quantizer.pack(x + block * quantizer.block_weights, weights.data() + block * quantizer.block_weights,
                           target + (row * blocks + block) * quantizer.block_bytes);
    });
}

}  // namespace ktqueue
