// Panels times rows, for any vocabulary of lanes. Layouts: formats/panel_layout.h (weights), formats/activations.h
// (rows). Included only by translation units of one instruction set, after a lanes header; internal linkage.
//
// A pass over a panel serves up to kMaxTokens rows. With more than a few rows two panels share a pass, so that each
// load of activations serves both. The codes of each slab are unpacked once and multiplied into every row's integer
// sums. The sums are scaled and added to the row's float sums:
//     sum += float(codes . q) * scale of x * scale of w        (and - minimum of w * total of x)
// or, for a superblock of Q4_K (see `WordFactors`),
//     sum += unit of w * (sum over slabs of float(factors of w . (codes . q, sum of q)) * scale of x)
//
// Invariant: the operations have this order on every instruction set, one slab after the other. So a result has the
// same bits whichever kernel computed it and whichever rows shared the pass. kernels/superblock_kernels.h does the same
// for many rows, in most formats.
#pragma once

#include <algorithm>

#include "isa/cpu_features.h"
#include "kernels/float_views.h"
#include "kernels/kernel_table.h"
#include "kernels/panel_views.h"
#include "kernels/superblock_kernels.h"

namespace ktqueue {
namespace {

// How far ahead software prefetch reads, because the hardware's own stops at each 4 KB page. Measured: 1.2 to 1.6 times
// as fast with many tokens, no loss with one. On servers with AMX two threads share a core and its few line buffers, so
// prefetch goes to the second-level cache, and further ahead (ADR 0012).
constexpr size_t kPrefetchBytes = 4096, kPrefetchBytesFar = 8192;
// Two panels are two streams, and the data just after one panel is the beginning of the other. So they prefetch the
// same place of the next two panels instead, into the second-level cache, if that is not further than this. All passes
// share the work, because memory is too slow for the first pass alone.
constexpr size_t kFarthestBytes = 128 * 1024;

template <size_t Count, int Locality>
inline void prefetch(const uint8_t* source) {
    for (size_t i = 0; i < Count; i += 64) __builtin_prefetch(source + i, 0, Locality);
}

// What the passes over one or two panels prefetch for later panels: per slab, `lines` cache lines of each panel.
template <size_t Panels>
struct Fetch {
    const uint8_t* next[Panels];
    size_t lines;
    bool once;  // only the first pass prefetches
    bool near;  // into the first-level cache

    void step() {
        for (size_t i = 0; i < lines; ++i)
            for (const uint8_t*& panel : next) {
                if (near)
                    __builtin_prefetch(panel, 0, 3);
                else
                    __builtin_prefetch(panel, 0, 2);
                panel += 64;
            }
    }
};

// State of formats with `words` over a superblock: its factors, and its sums before the multiplication by the unit.
template <class Format, size_t Panels, size_t Tokens, bool Words = activation_kind(Format::kQuant).words>
struct Superblocks {
    Superblocks(const uint8_t* const (&)[Panels], size_t) {}
};

template <class Format, size_t Panels, size_t Tokens>
struct Superblocks<Format, Panels, Tokens, true> {
    WordFactors factors[Panels];
    Floats sums[Panels][Tokens];

    Superblocks(const uint8_t* const (&blocks)[Panels], size_t slabs) {
        for (size_t p = 0; p < Panels; ++p) {
            factors[p] = Format(blocks[p], slabs).word_factors();
            for (Floats& sum : sums[p]) sum = zero_floats();
        }
    }
};

// sums[p][m] += one superblock of `slabs` slabs of panel p times the same slabs of x[m].
template <class Format, size_t Panels, size_t Tokens>
inline void add_superblock(const uint8_t* const (&blocks)[Panels], size_t slabs,
                           const ActivationSlab* const (&x)[Tokens], size_t first, Fetch<Panels>& fetch,
                           Floats (&sums)[Panels][Tokens]) {
    constexpr ActivationKind kKind = activation_kind(Format::kQuant);
    constexpr bool kWide = kKind.offset == 128;
    constexpr bool kCorrects = kKind.offset != 0 && !(kWide && kSubtractsOffset);
    constexpr size_t kHalves = kKind.halves ? 2 : 1;
    Superblocks<Format, Panels, Tokens> whole(blocks, slabs);
    for (size_t s = 0; s < slabs; ++s) {
        fetch.step();
        Floats halves[Panels][Tokens];  // formats with a scale per 16 columns: the result of their first half
#pragma GCC unroll 2
        for (size_t h = 0; h < kHalves; ++h) {
            Ints products[Panels][Tokens];
#pragma GCC unroll 8
            for (size_t m = 0; m < Tokens; ++m) {
                const Ints start = kCorrects ? splat_int(x[m][first + s].correction[h]) : zero_ints();
#pragma GCC unroll 2
                for (size_t p = 0; p < Panels; ++p) products[p][m] = start;
            }
#pragma GCC unroll 4
            for (size_t j = h * 4 / kHalves; j < (h + 1) * 4 / kHalves; ++j) {
                Bytes even[Panels], odd[Panels];
#pragma GCC unroll 2
                for (size_t p = 0; p < Panels; ++p) Format(blocks[p], slabs).lines(s, j, even[p], odd[p]);
#pragma GCC unroll 8
                for (size_t m = 0; m < Tokens; ++m) {
                    const Quad low = load_quad(x[m][first + s].q + 8 * j),
                               high = load_quad(x[m][first + s].q + 8 * j + 4);
#pragma GCC unroll 2
                    for (size_t p = 0; p < Panels; ++p) {
                        Ints& sum = products[p][m];
                        sum = kWide ? dot_wide(dot_wide(sum, even[p], low), odd[p], high)
                                    : dot(dot(sum, even[p], low), odd[p], high);
                    }
                }
            }
#pragma GCC unroll 2
            for (size_t p = 0; p < Panels; ++p) {
                if constexpr (kKind.words) {
                    const Ints factors = Format(blocks[p], slabs).factors(whole.factors[p], s);
#pragma GCC unroll 8
                    for (size_t m = 0; m < Tokens; ++m) {
                        const Floats product = to_floats(multiply_words(products[p][m], factors));
                        whole.sums[p][m] = fused(product, splat_float(x[m][first + s].scale), whole.sums[p][m]);
                    }
                    continue;
                }
                const Floats scale = Format(blocks[p], slabs).scale(s, h);
#pragma GCC unroll 8
                for (size_t m = 0; m < Tokens; ++m) {
                    const Floats product = to_floats(products[p][m]);
                    if constexpr (kHalves == 1) {
                        sums[p][m] = fused(times(product, splat_float(x[m][first + s].scale)), scale, sums[p][m]);
                    } else if (h == 0) {
                        halves[p][m] = times(product, scale);
                    } else {
                        sums[p][m] =
                            fused(fused(product, scale, halves[p][m]), splat_float(x[m][first + s].scale), sums[p][m]);
                    }
                }
            }
        }
        if constexpr (Format::kMinimums && !kKind.words)
#pragma GCC unroll 2
            for (size_t p = 0; p < Panels; ++p)
#pragma GCC unroll 2
                for (size_t h = 0; h < kHalves; ++h) {
                    const Floats minimum = Format(blocks[p], slabs).minimum(s, h);
#pragma GCC unroll 8
                    for (size_t m = 0; m < Tokens; ++m)
                        sums[p][m] = fused_negative(minimum, splat_float(x[m][first + s].total[h]), sums[p][m]);
                }
    }
    if constexpr (kKind.words)
#pragma GCC unroll 2
        for (size_t p = 0; p < Panels; ++p)
#pragma GCC unroll 8
            for (size_t m = 0; m < Tokens; ++m) sums[p][m] = fused(whole.sums[p][m], whole.factors[p].unit, sums[p][m]);
}

template <class Format, size_t Panels, size_t Tokens>
void dot_tokens(const PanelTask& task, size_t first_token, Fetch<Panels>& shared) {
    Fetch<Panels> fetch = shared;  // a copy that stays in registers
    const size_t slabs = (task.columns + kSlab - 1) / kSlab;
    const ActivationSlab* x[Tokens];
    for (size_t m = 0; m < Tokens; ++m) x[m] = static_cast<const ActivationSlab*>(task.x[first_token + m]);
    const uint8_t* blocks[Panels];
    for (size_t p = 0; p < Panels; ++p) blocks[p] = task.weights + p * task.panel_stride;
    Floats sums[Panels][Tokens];
    for (auto& panel : sums)
        for (Floats& sum : panel) sum = zero_floats();
    for (size_t s = 0; s < slabs; s += kSlabs) {
        add_superblock<Format, Panels, Tokens>(blocks, std::min(kSlabs, slabs - s), x, s, fetch, sums);
        for (const uint8_t*& block : blocks) block += superblock_bytes(Format::kQuant);
    }
    for (size_t p = 0; p < Panels; ++p)
        for (size_t m = 0; m < Tokens; ++m)
            store_floats(task.y + (first_token + m) * task.y_stride + p * kPanelRows, sums[p][m]);
    shared = fetch;
    if (fetch.once) shared.lines = 0;
}

// Calls Body<Tokens>::run(task, first token) for passes that together serve all tokens, each of at most Most. Each size
// of pass takes long to compile, so only few sizes exist: 5 and 7 tokens make two passes.
template <template <size_t> class Body, size_t Most, class... Shared>
inline void for_passes(const PanelTask& task, Shared&... shared) {
    for (size_t first = 0; first < task.tokens;) {
        size_t left = std::min(task.tokens - first, Most);
        const size_t beyond = task.tokens - first - left;
        if (left == 6 && (beyond == 1 || beyond == 2)) left = 4;  // 4 + 3 and 4 + 4 are better than 6 + 1 and 6 + 2
        const auto pass = [&]<size_t Tokens>() {
            if constexpr (Tokens <= Most) Body<Tokens>::run(task, first, shared...);
            first += Tokens;
        };
        if (left >= 8)
            pass.template operator()<8>();
        else if (left >= 6)
            pass.template operator()<6>();
        else if (left >= 4)
            pass.template operator()<4>();
        else if (left == 3)
            pass.template operator()<3>();
        else if (left == 2)
            pass.template operator()<2>();
        else
            pass.template operator()<1>();
    }
}

template <class Format, size_t Panels>
struct Dot {
    template <size_t Tokens>
    struct Pass {
        static void run(const PanelTask& task, size_t first, Fetch<Panels>& fetch) {
            dot_tokens<Format, Panels, Tokens>(task, first, fetch);
        }
    };
};

// One or two panels, all tokens, in passes of at most `Most` tokens.
template <class Format, size_t Panels, size_t Most>
void dot_passes(const PanelTask& task) {
    constexpr size_t kLines = (slab_bytes(Format::kQuant) + 63) / 64;
    const size_t next = Panels * task.panel_stride;
    const size_t passes = (task.tokens + Most - 1) / Most;
    const bool near = Panels == 1 && !has_amx();
    const size_t ahead = has_amx() ? kPrefetchBytesFar : kPrefetchBytes;
    const size_t distance = Panels > 1 && next <= kFarthestBytes ? next : ahead;
    Fetch<Panels> fetch;
    for (size_t p = 0; p < Panels; ++p) fetch.next[p] = task.weights + p * task.panel_stride + distance;
    fetch.once = distance == ahead;
    fetch.near = near;
    fetch.lines = fetch.once ? kLines : (kLines + passes - 1) / passes;
    for_passes<Dot<Format, Panels>::template Pass, Most>(task, fetch);
}

// A pair of panels, or one, serves all tokens before the next pair is loaded, so each comes from memory once.
template <class Format>
void dot_panels(const PanelTask& task) {
    PanelTask part = task;
    const size_t step = kMaxPairTokens && task.tokens >= kPairTokens ? 2 : 1;
    for (size_t p = 0; p < task.panels; p += part.panels) {
        part.panels = std::min(step, task.panels - p);
        part.weights = task.weights + p * task.panel_stride;
        part.y = task.y + p * kPanelRows;
        if constexpr (kMaxPairTokens > 0) {
            if (part.panels == 2) {
                // A third plane costs more operations per pass than superblocks save (measured with Q5_K).
                if constexpr (Format::kQuant != Quant::Q5_K && Format::kQuant != Quant::Q5_1) {
                    if (task.tokens >= kSuperblockTokens) {
                        dot_superblocks<Format>(part);
                        continue;
                    }
                }
                dot_passes<Format, 2, kMaxPairTokens>(part);
                continue;
            }
        }
        dot_passes<Format, 1, kMaxTokens>(part);
    }
}

// ---- float activations: the weights of a slab as floats, [32 columns][16 rows]

template <class Format, size_t Tokens>
void exact_tokens(const PanelTask& task, size_t first_token) {
    const size_t slabs = (task.columns + kSlab - 1) / kSlab;
    Floats sums[Tokens][2];  // even and odd columns
    for (auto& sum : sums) sum[0] = sum[1] = zero_floats();
    const uint8_t* block = task.weights;
    const float* x[Tokens];
    for (size_t m = 0; m < Tokens; ++m) x[m] = static_cast<const float*>(task.x[first_token + m]);
    for (size_t s = 0; s < slabs; ++s) {
        const size_t whole = s / kSlabs * kSlabs, of_block = std::min(kSlabs, slabs - whole);
        const Format format(block + s / kSlabs * superblock_bytes(Format::kQuant), of_block);
        if (first_token == 0)
            prefetch<slab_bytes(Format::kQuant), 3>(block + s * slab_bytes(Format::kQuant) + kPrefetchBytes);
        Floats weights[8];
        for (size_t j = 0; j < 4; ++j) {
            format.floats(s - whole, j, weights);  // columns 8j .. 8j + 7
#pragma GCC unroll 8
            for (size_t i = 0; i < 8; ++i)
#pragma GCC unroll 16
                for (size_t m = 0; m < Tokens; ++m)
                    sums[m][i % 2] = fused(weights[i], splat_float(x[m][s * kSlab + 8 * j + i]), sums[m][i % 2]);
        }
    }
    for (size_t m = 0; m < Tokens; ++m)
        store_floats(task.y + (first_token + m) * task.y_stride, plus(sums[m][0], sums[m][1]));
}

template <class Format>
struct Exact {
    template <size_t Tokens>
    struct Pass {
        static void run(const PanelTask& task, size_t first) { exact_tokens<Format, Tokens>(task, first); }
    };
};

template <class Format>
void exact_panels(const PanelTask& task) {
    for (size_t p = 0; p < task.panels; ++p) {
        PanelTask part = task;
        part.weights += p * task.panel_stride;
        part.panels = 1;
        part.y += p * kPanelRows;
        for_passes<Exact<Format>::template Pass, std::min<size_t>(kMaxTokens, 4)>(part);
    }
}

}  // namespace
}  // namespace ktqueue
