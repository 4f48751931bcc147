// Two panels times many rows, superblock by superblock. One superblock of both panels stays in the first-level cache
// while it serves all rows, and the next one is prefetched from memory. Sums wait in y.
// Included only by translation units of one instruction set, after a lanes header; internal linkage.
//
// Scales are converted to floats once per superblock instead of once per pass. Formats with a scale per 16 columns have
// their codes in two planes; these are unpacked to lines once. All other codes are unpacked in every pass, which does
// not occupy the multiplying ports. The operations on a row, and their order, are those of kernels/panel_kernels.h, so
// results are equal bit for bit. That file's kernels are faster with few rows.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/kernel_table.h"
#include "kernels/panel_views.h"

namespace ktqueue {
namespace {

constexpr size_t kSuperblockTokens = 12;  // from this many rows it is faster

// Calls body(0) .. body(Count - 1) with constant arguments, so that arrays indexed by them stay in registers.
template <size_t Count, class Body>
[[gnu::always_inline]] inline void unroll(Body&& body) {
    [&]<size_t... I>(std::index_sequence<I...>) __attribute__((always_inline)) {
        (body(std::integral_constant<size_t, I>{}), ...);
    }(std::make_index_sequence<Count>{});
}

// A superblock of two panels: lines of codes and, by slab, half and panel, the scales as floats. Formats with `words`
// have the factors of each slab and their units instead.
template <class Format>
struct Unpacked {
    static constexpr bool kWords = activation_kind(Format::kQuant).words;
    static constexpr bool kMinimums = Format::kMinimums && !kWords;
    static constexpr bool kStored =
        activation_kind(Format::kQuant).halves;  // whether unpack() writes the codes as lines
    static constexpr bool kLines = kStored || Format::kQuant == Quant::Q8_0;  // whether `codes` points to lines
    static constexpr size_t kHalves = activation_kind(Format::kQuant).halves ? 2 : 1;
    static constexpr size_t kSlabBytes = 8 * 64;

    const uint8_t* codes[2];  // [slabs][8] lines, or the superblock as it is stored
    alignas(64) int32_t factors[kWords ? kSlabs : 1][2][kPanelRows];
    alignas(64) float units[2][kPanelRows];
    alignas(64) float scales[kWords ? 1 : kSlabs][kHalves][2][kPanelRows];
    alignas(64) float minimums[kMinimums ? kSlabs : 1][kHalves][2][kPanelRows];
    alignas(64) uint8_t lines[2][kStored ? kSlabs * kSlabBytes : 1];

    void unpack(const uint8_t* block, size_t slabs, size_t panel) {
        const Format format(block, slabs);
        codes[panel] = kStored ? lines[panel] : block;
        if constexpr (kWords) {
            const auto of = format.word_factors();
            store_floats(units[panel], of.unit);
            for (size_t s = 0; s < slabs; ++s) store_ints(factors[s][panel], format.factors(of, s));
            return;
        }
        for (size_t s = 0; s < slabs; ++s) {
            if constexpr (kStored)
                unroll<4>([&](auto j) {
                    Bytes even, odd;
                    format.lines(s, j, even, odd);
                    store_bytes(lines[panel] + s * kSlabBytes + j * 128, even);
                    store_bytes(lines[panel] + s * kSlabBytes + j * 128 + 64, odd);
                });
            unroll<kHalves>([&](auto h) {
                store_floats(scales[s][h][panel], format.scale(s, h));
                if constexpr (kMinimums) store_floats(minimums[s][h][panel], format.minimum(s, h));
            });
        }
    }
};

// What the passes over a superblock prefetch from the next one: per slab, `lines` cache lines of each panel.
struct NextSuperblock {
    const uint8_t* panels[2];
    size_t lines;
};

// y[m] += the superblock times x[m], whose slabs start at `first`. Starts from 0 at the first superblock. Not inlined:
// as a function of its own the loop has all registers, and the compiler loads each line once instead of once per row.
template <class Format, size_t Tokens>
[[gnu::noinline, gnu::noclone, gnu::flatten]] void add_unpacked(const Unpacked<Format>& block, size_t slabs,
                                                                const void* const* rows, size_t first, float* y,
                                                                size_t y_stride, NextSuperblock& next) {
    constexpr bool kCorrects = activation_kind(Format::kQuant).offset != 0;
    constexpr bool kWords = Unpacked<Format>::kWords;
    constexpr size_t kHalves = Unpacked<Format>::kHalves;
    const ActivationSlab* x[Tokens];
    Floats sums[2][Tokens];  // with `words`, of this superblock only
    unroll<Tokens>([&](auto m) {
        x[m] = static_cast<const ActivationSlab*>(rows[m]) + first;
        unroll<2>([&](auto p) {
            sums[p][m] = kWords || first == 0 ? zero_floats() : load_floats(y + m * y_stride + p * kPanelRows);
        });
    });
    const uint8_t* codes[2] = {block.codes[0], block.codes[1]};
    for (size_t s = 0; s < slabs; ++s) {
        for (size_t i = 0; i < next.lines; ++i)
            for (const uint8_t*& panel : next.panels) {
                __builtin_prefetch(panel, 0, 3);
                panel += 64;
            }
        Floats halves[2][Tokens];  // the result of the first half
        unroll<kHalves>([&](auto h) {
            Ints products[2][Tokens];
            unroll<Tokens>([&](auto m) {
                products[0][m] = products[1][m] = kCorrects ? splat_int(x[m]->correction[h]) : zero_ints();
            });
            unroll<8 / kHalves>([&](auto i) {
                constexpr size_t kLine = h * 8 / kHalves + i;
                Bytes lines[2];  // of both panels
                unroll<2>([&](auto p) {
                    if constexpr (Unpacked<Format>::kLines) {
                        lines[p] = load_bytes(codes[p] + 64 * kLine);
                    } else {
                        Bytes pair[2];
                        Format(codes[p], slabs).lines(s, kLine / 2, pair[0], pair[1]);
                        lines[p] = pair[kLine % 2];
                    }
                });
                unroll<Tokens>([&](auto m) {
                    const Quad q = load_quad(x[m]->q + 4 * kLine);
                    unroll<2>([&](auto p) { products[p][m] = dot(products[p][m], lines[p], q); });
                });
            });
            unroll<2>([&](auto p) {
                if constexpr (kWords) {
                    const Ints factors = load_ints(block.factors[s][p]);
                    unroll<Tokens>([&](auto m) {
                        const Floats product = to_floats(multiply_words(products[p][m], factors));
                        sums[p][m] = fused(product, splat_float(x[m]->scale), sums[p][m]);
                    });
                    return;
                }
                const Floats scale = load_floats(block.scales[s][h][p]);
                unroll<Tokens>([&](auto m) {
                    const Floats product = to_floats(products[p][m]);
                    if constexpr (kHalves == 1) {
                        sums[p][m] = fused(times(product, splat_float(x[m]->scale)), scale, sums[p][m]);
                    } else if constexpr (h == 0) {
                        halves[p][m] = times(product, scale);
                    } else {
                        sums[p][m] = fused(fused(product, scale, halves[p][m]), splat_float(x[m]->scale), sums[p][m]);
                    }
                });
            });
        });
        if constexpr (Unpacked<Format>::kMinimums)
            unroll<2>([&](auto p) {
                unroll<kHalves>([&](auto h) {
                    const Floats minimum = load_floats(block.minimums[s][h][p]);
                    unroll<Tokens>(
                        [&](auto m) { sums[p][m] = fused_negative(minimum, splat_float(x[m]->total[h]), sums[p][m]); });
                });
            });
        unroll<Tokens>([&](auto m) { ++x[m]; });
        if constexpr (Unpacked<Format>::kLines) unroll<2>([&](auto p) { codes[p] += Unpacked<Format>::kSlabBytes; });
    }
    unroll<Tokens>([&](auto m) {
        unroll<2>([&](auto p) {
            float* out = y + m * y_stride + p * kPanelRows;
            if constexpr (kWords) {
                const Floats before = first == 0 ? zero_floats() : load_floats(out);
                sums[p][m] = fused(sums[p][m], load_floats(block.units[p]), before);
            }
            store_floats(out, sums[p][m]);
        });
    });
}

// Two panels, kSuperblockTokens tokens or more.
template <class Format>
void dot_superblocks(const PanelTask& task) {
    constexpr size_t kBytes = superblock_bytes(Format::kQuant);
    constexpr size_t kMost = Unpacked<Format>::kHalves == 2 ? 4 : 6;  // rows per pass, as many as fit the registers
    const size_t slabs = (task.columns + kSlab - 1) / kSlab;
    // Passes of nearly equal size: the first `more` passes have one row more.
    const size_t passes = (task.tokens + kMost - 1) / kMost;
    const size_t least = task.tokens / passes, more = task.tokens % passes;
    Unpacked<Format> unpacked;
    const uint8_t* block = task.weights;
    for (size_t s = 0; s < slabs; s += kSlabs, block += kBytes) {
        const size_t count = std::min(kSlabs, slabs - s);
        for (size_t p = 0; p < 2; ++p) unpacked.unpack(block + p * task.panel_stride, count, p);
        const uint8_t* then = s + kSlabs < slabs ? block + kBytes : task.weights + 2 * task.panel_stride;
        const size_t steps = passes * count;
        NextSuperblock next{{then, then + task.panel_stride}, (kBytes / 64 + steps - 1) / steps};
        for (size_t pass = 0, t = 0; pass < passes; ++pass) {
            const auto run = [&]<size_t Tokens>() {
                add_unpacked<Format, Tokens>(unpacked, count, task.x + t, s, task.y + t * task.y_stride, task.y_stride,
                                             next);
                t += Tokens;
            };
            // From 12 rows on no pass is smaller than 4, or 3 if kMost is 4: 13 rows are 5 + 4 + 4, or 4 + 3 + 3 + 3.
            static_assert(kSuperblockTokens == 12);
            const size_t tokens = least + (pass < more ? 1 : 0);
            if (tokens == kMost) {
                run.template operator()<kMost>();
            } else if (tokens + 1 == kMost) {
                run.template operator()<kMost - 1>();
            } else {
                run.template operator()<4>();
            }
        }
    }
}

}  // namespace
}  // namespace ktqueue
