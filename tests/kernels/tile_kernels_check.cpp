// Checks of the bf16 tile kernel on emulated tiles and, where this CPU has AMX, on real ones. Built and run by
// test_tile_kernels.py; exits 0 if all hold.
#include <sys/mman.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu_features.h"
#include "kernel_table.h"
#include "lanes_avx512.h"
#include "packed_matrix.h"
// What is written in lanes comes after them.
#include "bf16_tiles.h"
#include "tiles_amx.h"
#include "tiles_emulated.h"

using namespace ktqueue;

namespace {

constexpr size_t kMaxPanels = 3, kTokens = 128;
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

// Memory that ends at a page that may not be touched.
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

// Packed BF16 panels that end at a page that may not be touched.
struct Panels {
    size_t columns, stride;
    Fenced memory;
    std::vector<float> weights;  // [kRows][columns]

    explicit Panels(size_t columns)
        : columns(columns),
          stride(panel_bytes(Quant::BF16, columns)),
          memory(kMaxPanels * stride),
          weights(kRows * columns) {
        std::vector<uint16_t> rows(kRows * columns);
        for (size_t i = 0; i < rows.size(); ++i) {
            rows[i] = to_bf16(uniform(-1, 1));
            weights[i] = from_bf16(rows[i]);
        }
        const auto* data = reinterpret_cast<const uint8_t*>(rows.data());
        for (size_t p = 0; p < kMaxPanels; ++p)
            pack_panel({Quant::BF16, kRows, columns, data}, p, memory.data() + p * stride);
    }

    // [tokens][16 * panels] of the last panels. Fails if anything else of y is written.
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
                .y_stride = row});
        std::vector<float> result;
        for (size_t t = 0; t < tokens; ++t) {
            result.insert(result.end(), y + t * row, y + t * row + width);
            for (size_t i = width; i < row && t + 1 < tokens; ++i)
                require(std::memcmp(y + t * row + i, &kUntouched, 4) == 0, name() + ": wrote between rows");
        }
        return result;
    }

    std::string name() const { return std::to_string(columns) + " columns"; }
};

// Rows for BF16 weights, at a constant distance.
struct Bf16Rows {
    size_t padded;
    std::vector<uint16_t> values;  // [128][padded]

    explicit Bf16Rows(size_t columns) : padded(round_up(columns, kSlab)), values(kTokens * padded) {
        for (size_t t = 0; t < kTokens; ++t)
            for (size_t c = 0; c < columns; ++c)
                values[t * padded + c] = to_bf16(uniform(-1, 1) * (c % 97 == 5 ? 30.f : 1.f));
    }

    std::vector<float> times(const Panels& weights, PanelKernel kernel, size_t first, size_t tokens,
                             size_t panels = kMaxPanels) const {
        Fenced copy(tokens * padded * 2);
        std::memcpy(copy.data(), values.data() + first * padded, tokens * padded * 2);
        std::vector<const void*> x(tokens);
        for (size_t t = 0; t < tokens; ++t) x[t] = copy.data() + t * padded * 2;
        return weights.run(kernel, x, panels);
    }
};

// Against double arithmetic.
void values_are_right(const Panels& weights, const Bf16Rows& x, const std::vector<float>& y) {
    for (size_t t = 0; t < kTokens; ++t)
        for (size_t r = 0; r < kMaxPanels * kPanelRows; ++r) {
            double sum = 0, size = 0;
            for (size_t c = 0; c < weights.columns && r < kRows; ++c) {
                const double term = static_cast<double>(from_bf16(x.values[t * x.padded + c])) *
                                    weights.weights[r * weights.columns + c];
                sum += term;
                size += std::fabs(term);
            }
            require(std::fabs(y[t * kMaxPanels * kPanelRows + r] - sum) <= size * 0x1p-20,
                    weights.name() + ": row " + std::to_string(r) + ", token " + std::to_string(t) + " is wrong");
        }
}

// A result depends on its panel and its row of x alone, bit for bit; an infinity or a NaN stays in its row.
void company_changes_nothing(const Panels& weights, Bf16Rows& x, PanelKernel kernel, const std::vector<float>& alone) {
    for (size_t tokens : {1, 2, 15, 16, 17, 33, 64, 65, 128})
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
    for (uint16_t poison : {0x7f80, 0x7fc0}) {
        uint16_t& place = x.values[kPoisoned * x.padded + weights.columns - 3];
        const uint16_t before = std::exchange(place, poison);
        const std::vector<float> y = x.times(weights, kernel, 0, 33);
        place = before;
        for (size_t t = 0; t < 33; ++t) {
            const bool same = std::memcmp(y.data() + t * kWidth, alone.data() + t * kWidth, kWidth * 4) == 0;
            require(same == (t != kPoisoned), weights.name() + ": a poisoned row changes row " + std::to_string(t));
        }
    }
}

void bf16_is_right(size_t columns) {
    const Panels weights(columns);
    Bf16Rows x(columns);
    std::vector<float> alone;  // [128][48], each token by itself
    for (size_t t = 0; t < kTokens; ++t) {
        const std::vector<float> row = x.times(weights, bf16_tile_panels<EmulatedTiles>, t, 1);
        alone.insert(alone.end(), row.begin(), row.end());
    }
    values_are_right(weights, x, alone);
    company_changes_nothing(weights, x, bf16_tile_panels<EmulatedTiles>, alone);
    if (has_amx()) company_changes_nothing(weights, x, bf16_tile_panels<AmxTiles>, alone);
}

}  // namespace

int main() {
    for (size_t columns : {32, 50, 288, 768}) bf16_is_right(columns);
    return 0;
}
