// Checks of the tile kernels on emulated tiles and, where this CPU has AMX, on real ones; the rest runs on AVX-512. Built
// and run by test_tile_kernels.py; exits 0 if all hold.
#include <sys/mman.h>

#include <limits>
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
#include "row_kernels.h"
#include "tile_kernels.h"
#include "tiles_amx.h"
#include "tiles_emulated.h"

namespace ktqueue {

namespace {

// The kernel that tiles are held against: one token and one panel at a time.
template <class Format>
void dot_one_by_one(const PanelTask& task) {
    for (size_t p = 0; p < task.panels; ++p) {
        PanelTask one = task;
        one.weights += p * task.panel_stride;
        one.y += p * kPanelRows;
        for (size_t t = 0; t < task.tokens; ++t) dot_tokens<Format, 1, 1>(one, t);
    }
}

template <template <class> class Kernel>
struct BlockFormats {
    static constexpr PanelKernel kKernels[kQuantCount] = {nullptr,
                                                          nullptr,
                                                          nullptr,
                                                          Kernel<PanelQ4_0>::run,
                                                          Kernel<PanelQ8_0>::run,
                                                          Kernel<PanelQ2_K>::run,
                                                          Kernel<PanelQ3_K>::run,
                                                          Kernel<PanelQ4_K>::run,
                                                          Kernel<PanelQ5_K>::run,
                                                          Kernel<PanelQ6_K>::run,
                                                          Kernel<PanelIQ4_NL>::run,
                                                          Kernel<PanelIQ4_XS>::run,
                                                          Kernel<PanelMXFP4>::run};
};

template <class Format>
struct DotOneByOne {
    static void run(const PanelTask& task) { dot_one_by_one<Format>(task); }
};

template <class Format>
struct Emulated {
    static void run(const PanelTask& task) { tile_panels<Format, EmulatedTiles>(task); }
};

template <class Format>
struct Real {
    static void run(const PanelTask& task) { tile_panels<Format, AmxTiles>(task); }
};

}  // namespace

// The table of this program, which the tile kernels leave few tokens to.
const KernelTable& avx512_kernels() {
    static const KernelTable kTable = [] {
        KernelTable table{};
        std::copy_n(BlockFormats<DotOneByOne>::kKernels, kQuantCount, table.dot);
        return table;
    }();
    return kTable;
}

}  // namespace ktqueue

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

void put_half(uint8_t* target, float value) {
    const _Float16 half = static_cast<_Float16>(value);
    std::memcpy(target, &half, 2);
}

// Where a block's halves are; -1: none.
void halves_of(Quant quant, int (&at)[2]) {
    at[0] = at[1] = -1;
    switch (quant) {
        case Quant::Q4_0:
        case Quant::Q8_0:
        case Quant::IQ4_NL:
        case Quant::IQ4_XS:
            at[0] = 0;
            break;
        case Quant::Q4_K:
        case Quant::Q5_K:
            at[0] = 0, at[1] = 2;
            break;
        case Quant::Q2_K:
            at[0] = 80, at[1] = 82;
            break;
        case Quant::Q3_K:
            at[0] = 108;
            break;
        case Quant::Q6_K:
            at[0] = 208;
            break;
        default:
            break;
    }
}

// Random rows of blocks, some scales zero or subnormal.
std::vector<uint8_t> random_rows(Quant quant, size_t rows, size_t columns) {
    std::vector<uint8_t> data(rows * row_bytes(quant, columns));
    const QuantFormat& format = quant_format(quant);
    int halves[2];
    halves_of(quant, halves);
    for (size_t block = 0; block * format.block_bytes < data.size(); ++block) {
        uint8_t* bytes = data.data() + block * format.block_bytes;
        for (size_t i = 0; i < format.block_bytes; ++i) bytes[i] = static_cast<uint8_t>(generator());
        const float magnitude = block % 7 == 3 ? 0.0f : block % 11 == 5 ? 3e-6f : uniform(0.001f, 0.02f);
        for (int at : halves)
            if (at >= 0) put_half(bytes + at, magnitude * uniform(-1, 1));
        if (quant == Quant::MXFP4) bytes[0] = static_cast<uint8_t>(110 + generator() % 20);
        if (quant == Quant::BF16) {
            const uint16_t half = to_bf16(uniform(-1, 1));
            std::memcpy(bytes, &half, 2);
        }
    }
    return data;
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

// Packed panels that end at a page that may not be touched.
struct Panels {
    Quant quant;
    size_t columns, stride;
    Fenced memory;
    std::vector<float> weights;  // [kRows][columns]

    Panels(Quant quant, size_t columns)
        : quant(quant),
          columns(columns),
          stride(panel_bytes(quant, columns)),
          memory(kMaxPanels * stride),
          weights(kRows * columns) {
        const std::vector<uint8_t> rows = random_rows(quant, kRows, columns);
        for (size_t p = 0; p < kMaxPanels; ++p)
            pack_panel({quant, kRows, columns, rows.data()}, p, memory.data() + p * stride);
        for (size_t r = 0; r < kRows; ++r)
            dequantize_kernel(quant)(rows.data() + r * row_bytes(quant, columns), columns,
                                     weights.data() + r * columns);
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

    std::string name() const { return std::string(quant_format(quant).name) + " " + std::to_string(columns); }
};

// Rows that end at a page that may not be touched, from the last to the first; every 37th has a NaN.
struct Int8Rows {
    Fenced memory;
    std::vector<const void*> x;

    Int8Rows(Quant quant, size_t columns, size_t tokens)
        : memory(tokens * (columns + kSlab - 1) / kSlab * sizeof(ActivationSlab)) {
        const size_t bytes = columns / kSlab * sizeof(ActivationSlab);
        std::vector<float> row(columns);
        for (size_t t = 0; t < tokens; ++t) {
            for (size_t c = 0; c < columns; ++c) row[c] = uniform(-1, 1) * (c % 97 == 5 ? 30.f : 1.f);
            if (t % 37 == 20) row[columns - 3] = std::numeric_limits<float>::quiet_NaN();
            auto* to = reinterpret_cast<ActivationSlab*>(memory.data() + (tokens - 1 - t) * bytes);
            quantize(row.data(), columns, activation_kind(quant), to);
            x.push_back(to);
        }
    }
};

bool equal(float a, float b) {
    return std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b));
}

void tiles_equal_dot(const Panels& problem, size_t tokens, size_t panels) {
    const auto index = static_cast<size_t>(problem.quant);
    const Int8Rows rows(problem.quant, problem.columns, tokens);
    const std::vector<float> expected = problem.run(BlockFormats<DotOneByOne>::kKernels[index], rows.x, panels);
    require(std::isnan(expected[0]) == false && expected[0] != 0, problem.name() + ": nothing to compare");
    const auto agrees = [&](PanelKernel kernel, const char* tiles) {
        const std::vector<float> y = problem.run(kernel, rows.x, panels);
        for (size_t i = 0; i < y.size(); ++i)
            require(equal(y[i], expected[i]), problem.name() + ": " + std::to_string(tokens) + " tokens, " +
                                                  std::to_string(panels) + " panels on " + tiles + " tiles: result " +
                                                  std::to_string(i) + " is " + std::to_string(y[i]) + ", not " +
                                                  std::to_string(expected[i]));
    };
    agrees(BlockFormats<Emulated>::kKernels[index], "emulated");
    if (has_amx()) agrees(BlockFormats<Real>::kKernels[index], "real");
}

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
    const Panels weights(Quant::BF16, columns);
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
    for (size_t i = 0; i < kQuantCount; ++i) {
        const Quant quant = static_cast<Quant>(i);
        if (is_float(quant)) continue;
        for (size_t columns : {32, 64, 256, 288, 768, 2304}) {
            if (columns % quant_format(quant).block_weights != 0) continue;
            const Panels problem(quant, columns);
            for (size_t tokens : {1, 5, 15, 16, 17, 31, 32, 33, 48, 64, 65, 128, 512})
                for (size_t panels = 1; panels <= kMaxPanels; ++panels)
                    if (tokens <= 65 || columns <= 256) tiles_equal_dot(problem, tokens, panels);
        }
        std::printf("%s: tiles equal dot\n", quant_format(quant).name);
    }
    for (size_t columns : {32, 50, 288, 768}) bf16_is_right(columns);
    return 0;
}
