// Checks of the tile kernels on emulated tiles; the unpacking runs on this CPU's AVX-512. Built and run by
// test_tile_kernels.py; exits 0 if all hold.
#include <sys/mman.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu_features.h"
#include "kernel_table.h"
#include "packed_matrix.h"
// Lanes first, then what is written in them.
#include "lanes_avx512.h"
#include "tile_kernels.h"
#include "tiles_emulated.h"
#if KTQUEUE_REAL_TILES
#include "tiles_amx.h"
#endif

using namespace ktqueue;

namespace {

template <class Tiles>
constexpr PanelKernel kKernels[kQuantCount] = {
    tile_panels<PanelF32, Tiles>,  tile_panels<PanelF16, Tiles>,    tile_panels<PanelBF16, Tiles>,
    tile_panels<PanelQ4_0, Tiles>, tile_panels<PanelQ8_0, Tiles>,   tile_panels<PanelQ2_K, Tiles>,
    tile_panels<PanelQ3_K, Tiles>, tile_panels<PanelQ4_K, Tiles>,   tile_panels<PanelQ5_K, Tiles>,
    tile_panels<PanelQ6_K, Tiles>, tile_panels<PanelIQ4_NL, Tiles>, tile_panels<PanelIQ4_XS, Tiles>,
    tile_panels<PanelMXFP4, Tiles>};

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
        if (quant == Quant::F16) put_half(bytes, uniform(-1, 1));
        if (quant == Quant::F32 || quant == Quant::BF16) {
            const float value = uniform(-1, 1);
            const uint16_t half = to_bf16(value);
            if (quant == Quant::F32) {
                std::memcpy(bytes, &value, 4);
            } else {
                std::memcpy(bytes, &half, 2);
            }
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

struct Problem {
    Quant quant;
    size_t columns, padded;
    std::vector<uint8_t> packed;  // from the first 64-byte boundary
    const uint8_t* panels;
    std::vector<uint16_t> x;     // [128][padded]
    std::vector<float> weights;  // [kRows][columns]

    Problem(Quant quant, size_t columns)
        : quant(quant),
          columns(columns),
          padded(round_up(columns, kSlab)),
          packed(kMaxPanels * panel_bytes(quant, columns) + 64),
          panels(packed.data() + (64 - reinterpret_cast<uintptr_t>(packed.data()) % 64) % 64),
          x(kTokens * padded),
          weights(kRows * columns) {
        const std::vector<uint8_t> rows = random_rows(quant, kRows, columns);
        for (size_t p = 0; p < kMaxPanels; ++p)
            pack_panel({quant, kRows, columns, rows.data()}, p,
                       const_cast<uint8_t*>(panels) + p * panel_bytes(quant, columns));
        for (size_t r = 0; r < kRows; ++r)
            dequantize_kernel(quant)(rows.data() + r * row_bytes(quant, columns), columns,
                                     weights.data() + r * columns);
        for (size_t t = 0; t < kTokens; ++t)
            for (size_t c = 0; c < columns; ++c)
                x[t * padded + c] = to_bf16(uniform(-1, 1) * (c % 97 == 5 ? 30.f : 1.f));
    }

    // [tokens][16 * panels], of tokens first .. of x. Fails if anything else of y is written.
    template <class Tiles = EmulatedTiles>
    std::vector<float> run(size_t first, size_t tokens, size_t panel_count) const {
        constexpr size_t kGap = 16;
        const size_t width = kPanelRows * panel_count, stride = width + kGap;
        Fenced copy(tokens * padded * 2), out(((tokens - 1) * stride + width) * 4);
        std::memcpy(copy.data(), x.data() + first * padded, tokens * padded * 2);
        float* y = reinterpret_cast<float*>(out.data());
        for (size_t i = 0; i < (tokens - 1) * stride + width; ++i) std::memcpy(y + i, &kUntouched, 4);
        std::vector<const void*> pointers(tokens);
        for (size_t t = 0; t < tokens; ++t) pointers[t] = copy.data() + t * padded * 2;
        kKernels<Tiles>[static_cast<size_t>(quant)]({.weights = panels,
                                                     .panels = panel_count,
                                                     .panel_stride = panel_bytes(quant, columns),
                                                     .columns = columns,
                                                     .x = pointers.data(),
                                                     .tokens = tokens,
                                                     .y = y,
                                                     .y_stride = stride});
        std::vector<float> result;
        for (size_t t = 0; t < tokens; ++t) {
            result.insert(result.end(), y + t * stride, y + t * stride + width);
            for (size_t i = width; i < stride && t + 1 < tokens; ++i)
                require(std::memcmp(y + t * stride + i, &kUntouched, 4) == 0, name() + ": wrote between rows");
        }
        return result;
    }

    std::string name() const { return std::string(quant_format(quant).name) + " " + std::to_string(columns); }
};

// Against double arithmetic on the dequantised weights, rounded to bf16 and as they are. With minimums the kernel may
// take the neighbour of a weight that is nearly a tie.
void values_are_right(const Problem& problem, const std::vector<float>& y) {
    const Quant quant = problem.quant;
    const bool minimums = quant == Quant::Q2_K || quant == Quant::Q4_K || quant == Quant::Q5_K;
    double worst = 0;
    for (size_t t = 0; t < kTokens; ++t)
        for (size_t r = 0; r < kMaxPanels * kPanelRows; ++r) {
            double rounded = 0, exact = 0, size = 0;
            for (size_t c = 0; c < problem.columns && r < kRows; ++c) {
                const double x = from_bf16(problem.x[t * problem.padded + c]);
                const float w = problem.weights[r * problem.columns + c];
                rounded += x * from_bf16(to_bf16(w));
                exact += x * w;
                size += std::fabs(x * w);
            }
            const double value = y[t * kMaxPanels * kPanelRows + r];
            worst = std::max(worst, size > 0 ? std::fabs(value - rounded) / size : 0);
            require(std::fabs(value - rounded) <= size * (minimums ? 0x1p-12 : 0x1p-20),
                    problem.name() + ": row " + std::to_string(r) + ", token " + std::to_string(t) + " is " +
                        std::to_string(value) + ", not " + std::to_string(rounded));
            require(std::fabs(value - exact) <= size * 0x1p-8, problem.name() + ": is not near the exact product");
        }
    std::printf("%s: %.2g of the sum of magnitudes\n", problem.name().c_str(), worst);
}

// A result depends on its panel and its row of x alone, bit for bit.
void company_changes_nothing(const Problem& problem, const std::vector<float>& alone) {
    for (size_t tokens : {1, 2, 3, 15, 16, 17, 33, 64, 65, 128})
        for (size_t panels = 1; panels <= kMaxPanels; ++panels) {
            const size_t first = tokens % 2 ? kTokens - tokens : 0;
            const std::vector<float> y = problem.run(first, tokens, panels);
            for (size_t t = 0; t < tokens; ++t)
                require(std::memcmp(y.data() + t * panels * kPanelRows,
                                    alone.data() + (first + t) * kMaxPanels * kPanelRows, panels * kPanelRows * 4) == 0,
                        problem.name() + ": " + std::to_string(tokens) + " tokens, " + std::to_string(panels) +
                            " panels differ from one token at token " + std::to_string(t));
        }
}

// An infinity or a NaN in x stays in its row.
void poison_stays_in_its_row(Problem& problem, const std::vector<float>& alone) {
    constexpr size_t kPoisoned = 20, kWidth = kMaxPanels * kPanelRows;
    for (uint16_t poison : {0x7f80, 0x7fc0}) {
        uint16_t& place = problem.x[kPoisoned * problem.padded + problem.columns - 3];
        const uint16_t before = place;
        place = poison;
        const std::vector<float> y = problem.run(0, 33, kMaxPanels);
        place = before;
        for (size_t t = 0; t < 33; ++t) {
            const bool same = std::memcmp(y.data() + t * kWidth, alone.data() + t * kWidth, kWidth * 4) == 0;
            require(same == (t != kPoisoned), problem.name() + ": a poisoned row changes row " + std::to_string(t));
        }
    }
}

// More tokens than share an unpacked superblock, and long rows that let fewer share it.
void blocks_of_tokens_agree(Quant quant, size_t columns, size_t tokens) {
    Problem problem(quant, columns);
    std::vector<uint16_t> many;
    for (size_t t = 0; t < tokens; ++t)
        many.insert(many.end(), problem.x.begin() + static_cast<ptrdiff_t>(t % 128 * problem.padded),
                    problem.x.begin() + static_cast<ptrdiff_t>((t % 128 + 1) * problem.padded));
    const std::vector<float> few = problem.run(0, 128, 1);
    problem.x = many;
    const std::vector<float> y = problem.run(0, tokens, 1);
    for (size_t i = 0; i < y.size(); ++i)
        require(std::memcmp(&y[i], &few[i % few.size()], 4) == 0, problem.name() + ": blocks of tokens agree");
}

#if KTQUEUE_REAL_TILES
// The emulation is exact.
void hardware_agrees(const Problem& problem, const std::vector<float>& alone) {
    for (size_t tokens : {1, 16, 17, 33, 128}) {
        const std::vector<float> y = problem.run<AmxTiles>(0, tokens, kMaxPanels);
        require(std::memcmp(y.data(), alone.data(), y.size() * 4) == 0, problem.name() + ": the hardware differs");
    }
}
#endif

}  // namespace

int main() {
    for (size_t i = 0; i < kQuantCount; ++i) {
        const Quant quant = static_cast<Quant>(i);
        for (size_t columns : {32, 64, 256, 288, 768, 2048, 50}) {
            if (columns % quant_format(quant).block_weights != 0) continue;
            Problem problem(quant, columns);
            std::vector<float> alone;  // [128][48], each token by itself
            for (size_t t = 0; t < kTokens; ++t) {
                const std::vector<float> row = problem.run(t, 1, kMaxPanels);
                alone.insert(alone.end(), row.begin(), row.end());
            }
            values_are_right(problem, alone);
            company_changes_nothing(problem, alone);
#if KTQUEUE_REAL_TILES
            if (has_amx()) hardware_agrees(problem, alone);
#endif
            if (columns == 768) poison_stays_in_its_row(problem, alone);
        }
    }
    blocks_of_tokens_agree(Quant::Q4_K, 256, 300);
    blocks_of_tokens_agree(Quant::Q8_0, 6400, 161);
    return 0;
}
