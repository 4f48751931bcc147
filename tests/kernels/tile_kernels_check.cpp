// Checks of the tile kernels on emulated tiles and halves and, if this CPU has AMX, on real ones. Built and run by
// test_tile_kernels.py. Exits with 0 if all hold.
#include <sys/mman.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "formats/half.h"
#include "formats/packed_matrix.h"
#include "isa/cpu_features.h"
#include "isa/lanes_avx512.h"
#include "isa/vector_avx512.h"
#include "kernels/kernel_table.h"
#include "kernels/prepared_rows.h"
#include "tiles_emulated.h"
// Kernels are written with the lanes and vectors above, so they follow.
#include "isa/tiles_amx.h"
#include "kernels/tile_kernels.h"

using namespace ktqueue;

namespace {

constexpr size_t kMaxPanels = 3, kTokens = 300;
constexpr size_t kRows = kMaxPanels * kPanelRows - 5;  // the last panel is not full
constexpr uint32_t kUntouched = 0x7fc12345;

std::mt19937 generator(7);

void require(bool holds, const std::string& what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what.c_str());
    std::exit(1);
}

float uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(generator);
}

uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Memory that ends at a page without access rights.
class Fenced {
  public:
    explicit Fenced(size_t bytes) : bytes_(bytes), mapped_(round_up(bytes, 4096) + 4096) {
        base_ =
            static_cast<uint8_t*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        require(base_ != MAP_FAILED && mprotect(base_ + mapped_ - 4096, 4096, PROT_NONE) == 0, "memory");
    }
    ~Fenced() { munmap(base_, mapped_); }
    Fenced(const Fenced&) = delete;
    Fenced& operator=(const Fenced&) = delete;
    uint8_t* data() const { return base_ + mapped_ - 4096 - bytes_; }

  private:
    size_t bytes_, mapped_;
    uint8_t* base_;
};

// Blocks of random codes with scales of 2^-9 to 2^-8: any code, any scale of its few bits.
std::vector<uint8_t> random_blocks(Quant quant, size_t weights, size_t columns) {
    const QuantFormat& format = quant_format(quant);
    std::vector<uint8_t> data(weights / format.block_weights * format.block_bytes);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(generator());
    for (size_t at = 0; at < data.size(); at += format.block_bytes) {
        uint8_t* block = data.data() + at;
        const auto put = [&](size_t offset) { block[offset + 1] = static_cast<uint8_t>(0x18 | generator() % 4); };
        switch (quant) {
            case Quant::MXFP4:
                block[0] = static_cast<uint8_t>(120 + generator() % 3);
                break;
            case Quant::Q4_1:
            case Quant::Q5_1:
                put(0), put(2);
                break;
            case Quant::UINT4:
                put(0);
                block[2] &= 15;
                break;
            case Quant::NVFP4:
                for (size_t k = 0; k < 4; ++k) block[k] = static_cast<uint8_t>(1 + generator() % 24);
                break;
            case Quant::FP8: {
                const float d = 0.00002f * static_cast<float>(1 + generator() % 8);
                std::memcpy(block, &d, sizeof(d));
                for (size_t i = 4; i < 132; ++i)
                    if ((block[i] & 127) == 127) block[i] = 0x7e;
                break;
            }
            case Quant::FP4: {
                const size_t row = at / row_bytes(quant, columns);  // its blocks have the same factors
                const float d = 0.0001f * static_cast<float>(1 + std::fmod(0.618034 * static_cast<double>(row), 1.0));
                const float factors[2] = {d, d * 0x1p-7f};
                std::memcpy(block, factors, sizeof(factors));
                for (size_t k = 8; k < 12; ++k) block[k] = static_cast<uint8_t>(60 + generator() % 24);
                break;
            }
            case Quant::IQ1_M:  // a digit of the half in each word
                for (size_t k : {49, 51, 53, 55}) block[k] &= 15;
                block[53] |= static_cast<uint8_t>((8 | generator() % 4) << 4);
                block[55] |= 1 << 4;
                break;
            case Quant::Q2_K:
                put(80), put(82);
                break;
            case Quant::Q3_K:
                put(108);
                break;
            case Quant::Q4_K:
            case Quant::Q5_K:
                put(0), put(2);
                break;
            case Quant::Q6_K:
                put(208);
                break;
            default:
                put(0);
        }
    }
    return data;
}

// Packed panels that end at a page without access rights.
struct Panels {
    Quant quant;
    size_t columns, stride;
    Fenced memory;
    std::vector<float> weights;  // [kRows][columns]
    float unit = 1, bound = 0;

    Panels(Quant quant, size_t columns)
        : quant(quant),
          columns(columns),
          stride(panel_bytes(quant, columns)),
          memory(kMaxPanels * stride),
          weights(kRows * columns) {
        std::vector<uint8_t> rows = quant == Quant::BF16 ? std::vector<uint8_t>(2 * weights.size())
                                                         : random_blocks(quant, weights.size(), columns);
        for (size_t i = 0; quant == Quant::BF16 && i < weights.size(); ++i) {
            const uint16_t half = to_bf16(uniform(-1, 1));
            std::memcpy(rows.data() + 2 * i, &half, 2);
        }
        dequantize_kernel(quant)(rows.data(), weights.size(), weights.data());
        for (size_t p = 0; p < kMaxPanels; ++p)
            bound = std::max(bound, pack_panel({quant, kRows, columns, rows.data()}, p, memory.data() + p * stride));
        if (quant == Quant::BF16) return;
        unit = tile_unit(bound);
        for (float weight : weights) require(std::fabs(weight) <= bound, name() + ": a weight beyond its bound");
    }

    // Returns [tokens][16 * panels] of the last panels. Fails if anything else of y is written.
    std::vector<float> run(PanelKernel kernel, const std::vector<const void*>& x, size_t panels) const {
        constexpr size_t kGap = 16;
        const size_t tokens = x.size(), width = kPanelRows * panels, row = width + kGap;
        Fenced out(((tokens - 1) * row + width) * 4);
        float* y = reinterpret_cast<float*>(out.data());
        for (size_t i = 0; i < (tokens - 1) * row + width; ++i) std::memcpy(y + i, &kUntouched, 4);
        kernel({.weights = memory.data() + (kMaxPanels - panels) * stride,
                .panels = panels,
                .panel_stride = stride,
                .columns = columns,
                .x = x.data(),
                .tokens = tokens,
                .y = y,
                .y_stride = row,
                .unit = unit});
        std::vector<float> result;
        for (size_t t = 0; t < tokens; ++t) {
            result.insert(result.end(), y + t * row, y + t * row + width);
            for (size_t i = width; i < row && t + 1 < tokens; ++i)
                require(std::memcmp(y + t * row + i, &kUntouched, 4) == 0, name() + ": wrote between rows");
        }
        return result;
    }

    std::string name() const {
        return std::string(quant_format(quant).name) + ", " + std::to_string(columns) + " columns";
    }
};

// Rows in the kernel's form, at a constant distance.
struct Rows {
    size_t padded;
    std::vector<float> values;     // [kTokens][padded]; for BF16 weights, numbers that bf16 holds exactly
    std::vector<uint16_t> halves;  // [kTokens][padded], prepared

    Rows(const Panels& weights)
        : padded(round_up(weights.columns, kSlab)), values(kTokens * padded), halves(kTokens * padded) {
        const bool plain = weights.quant == Quant::BF16;
        for (size_t t = 0; t < kTokens; ++t)
            for (size_t c = 0; c < weights.columns; ++c) {
                const float value = uniform(-1, 1) * (c % 97 == 5 ? 30.f : 1.f);
                values[t * padded + c] = plain ? from_bf16(to_bf16(value)) : value;
            }
        for (size_t t = 0; t < kTokens; ++t) make(weights, t);
    }

    void make(const Panels& weights, size_t t) {
        const float* row = values.data() + t * padded;
        uint16_t* out = halves.data() + t * padded;
        weights.quant == Quant::BF16 ? bf16_row(row, weights.columns, out)
                                     : shuffle(row, weights.columns, weights.unit, out);
    }

    std::vector<float> times(const Panels& weights, PanelKernel kernel, size_t first, size_t tokens,
                             size_t panels = kMaxPanels) const {
        Fenced copy(tokens * padded * 2);
        std::memcpy(copy.data(), halves.data() + first * padded, tokens * padded * 2);
        std::vector<const void*> x(tokens);
        for (size_t t = 0; t < tokens; ++t) x[t] = copy.data() + t * padded * 2;
        return weights.run(kernel, x, panels);
    }
};

// Compares with double arithmetic. BF16: up to rounding of the sums. Block formats: up to bf16's rounding of weights
// and activations, with each sum within a few standard deviations, all of them within kTileError, and no systematic
// factor.
constexpr double kTileError = 0.0027, kFactorError = 0.0012;

void values_are_right(const Panels& weights, const Rows& x, const std::vector<float>& y) {
    double square = 0, base = 0, both = 0;
    for (size_t t = 0; t < kTokens; ++t)
        for (size_t r = 0; r < kMaxPanels * kPanelRows; ++r) {
            double sum = 0, size = 0, root = 0, sizes = 0;
            for (size_t c = 0; c < weights.columns; ++c) {
                sizes += std::fabs(x.values[t * x.padded + c]);
                if (r >= kRows) continue;
                const double term =
                    static_cast<double>(x.values[t * x.padded + c]) * weights.weights[r * weights.columns + c];
                sum += term;
                size += std::fabs(term);
                root += term * term;
            }
            const double got = y[t * kMaxPanels * kPanelRows + r], error = std::fabs(got - sum);
            const bool plain = weights.quant == Quant::BF16;
            // A weight of 0 is 2^-30 of the largest that tiles could hold.
            const double bound = plain ? size * 0x1p-20 : 0.03 * std::sqrt(root) + sizes * weights.bound * 0x1p-25;
            require(error <= bound,
                    weights.name() + ": row " + std::to_string(r) + ", token " + std::to_string(t) + " is wrong");
            square += error * error;
            base += sum * sum;
            both += got * sum;
        }
    const double relative = std::sqrt(square / base), factor = both / base - 1;
    if (std::getenv("TILE_ERRORS"))
        std::printf("%s: error %.3f %%, factor %+.3f %%\n", weights.name().c_str(), 100 * relative, 100 * factor);
    require(relative <= kTileError && std::fabs(factor) <= kFactorError,
            weights.name() + ": error " + std::to_string(relative) + ", factor " + std::to_string(factor));
}

// A result depends only on its panel and its row of x, bit for bit. An infinity or a NaN stays in its row.
void other_rows_change_nothing(const Panels& weights, Rows& x, PanelKernel kernel, const std::vector<float>& alone) {
    for (size_t tokens : {1, 2, 15, 16, 17, 33, 48, 64, 65, 128, 270, 300})
        for (size_t panels = 1; panels <= kMaxPanels; ++panels) {
            const size_t first = tokens % 2 ? kTokens - tokens : 0, width = panels * kPanelRows;
            const std::vector<float> y = x.times(weights, kernel, first, tokens, panels);
            for (size_t t = 0; t < tokens; ++t)
                require(
                    std::memcmp(y.data() + t * width,
                                alone.data() + ((first + t + 1) * kMaxPanels - panels) * kPanelRows, width * 4) == 0,
                    weights.name() + ": " + std::to_string(tokens) + " tokens, " + std::to_string(panels) +
                        " panels differ from one token at token " + std::to_string(t));
        }
    constexpr size_t kPoisoned = 20, kWidth = kMaxPanels * kPanelRows;
    for (float poison : {INFINITY, NAN, -NAN}) {
        float& place = x.values[kPoisoned * x.padded + weights.columns - 3];
        const float before = std::exchange(place, poison);
        x.make(weights, kPoisoned);
        const std::vector<float> y = x.times(weights, kernel, 0, 33);
        place = before;
        x.make(weights, kPoisoned);
        for (size_t t = 0; t < 33; ++t) {
            const bool same = std::memcmp(y.data() + t * kWidth, alone.data() + t * kWidth, kWidth * 4) == 0;
            require(same == (t != kPoisoned), weights.name() + ": a poisoned row changes row " + std::to_string(t));
        }
        for (size_t r = 0; r < kRows; ++r)
            require(weights.quant == Quant::BF16 ? !std::isfinite(y[kPoisoned * kWidth + r])
                                                 : std::isnan(y[kPoisoned * kWidth + r]),
                    weights.name() + ": a number out of poison");
    }
}

void kernel_is_right(Quant quant, size_t columns, PanelKernel emulated, PanelKernel real) {
    const Panels weights(quant, columns);
    Rows x(weights);
    std::vector<float> alone;  // [kTokens][48], each token alone
    for (size_t t = 0; t < kTokens; ++t) {
        const std::vector<float> row = x.times(weights, emulated, t, 1);
        alone.insert(alone.end(), row.begin(), row.end());
    }
    values_are_right(weights, x, alone);
    other_rows_change_nothing(weights, x, emulated, alone);
    if (real) other_rows_change_nothing(weights, x, real, alone);
}

}  // namespace

int main() {
    for (size_t columns : {32, 50, 288, 768})
        kernel_is_right(Quant::BF16, columns, bf16_tile_panels<EmulatedTiles>,
                        has_amx() ? bf16_tile_panels<AmxTiles> : nullptr);
    KernelTable emulated{}, real{};
    size_t tokens[kQuantCount];
    std::fill(std::begin(tokens), std::end(tokens), 1);
    add_block_tiles<EmulatedTiles, EmulatedHalf>(emulated, tokens);
    if (has_amx() && has_avx512_halves()) add_block_tiles<AmxTiles, FullHalf>(real, tokens);
    for (size_t i = 0; i < kQuantCount; ++i) {
        const auto quant = static_cast<Quant>(i);
        if (!emulated.tiles[i]) continue;
        for (size_t columns : {32, 64, 288, 512})
            if (columns % quant_format(quant).block_weights == 0)
                kernel_is_right(quant, columns, emulated.tiles[i], real.tiles[i]);
    }
    return 0;
}
