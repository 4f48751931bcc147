// Panels times rows, for any vocabulary of lanes. See panel_layout.h for what lies where, activations.h for rows.
// Included only by translation units of one instruction set, after a lanes header; internal linkage.
//
// A pass over a panel serves up to kMaxTokens rows. Of each slab the codes are unpacked once, multiplied into every
// row's integer sums, and the sums, scaled, are added to its float sums:
//     sum += float(codes . q) * scale of x * scale of w        (and - minimum of w * total of x)
// in that order of operations on every instruction set, one slab after the other, so that a result is the same bit for
// bit whichever kernel computed it and whatever else shared the pass.
#pragma once

#include <algorithm>

#include "kernel_table.h"
#include "panel_format.h"

namespace ktqueue {
namespace {

// Software prefetch, so far ahead: the hardware's own stops at each 4 KB page. Measured: 1.2 to 1.6 times at many
// tokens, nothing lost at one.
constexpr size_t kPrefetchBytes = 4096;

template <size_t Count>
inline void prefetch(const uint8_t* source) {
    for (size_t i = 0; i < Count; i += 64) __builtin_prefetch(source + kPrefetchBytes + i, 0, 3);
}

// sums[m] += one superblock of `slabs` slabs times the same slabs of x[m].
template <class Format, size_t Tokens>
inline void add_superblock(const uint8_t* block, size_t slabs, const ActivationSlab* const (&x)[Tokens], size_t first,
                           bool ahead, Floats (&sums)[Tokens]) {
    constexpr ActivationKind kKind = activation_kind(Format::kQuant);
    constexpr bool kWide = kKind.offset == 128;
    constexpr bool kCorrects = kKind.offset != 0 && !(kWide && kSubtractsOffset);
    constexpr size_t kSums = kKind.halves ? 2 : 1;
    const Format format(block, slabs);
    for (size_t s = 0; s < slabs; ++s) {
        if (ahead) prefetch<slab_bytes(Format::kQuant)>(block + s * slab_bytes(Format::kQuant));
        Ints products[kSums][Tokens];
#pragma GCC unroll 16
        for (size_t m = 0; m < Tokens; ++m)
            for (size_t h = 0; h < kSums; ++h)
                products[h][m] = kCorrects ? splat_int(x[m][first + s].correction[h]) : zero_ints();
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; ++j) {
            Bytes even, odd;
            format.lines(s, j, even, odd);
            Ints(&half)[Tokens] = products[kKind.halves ? j / 2 : 0];
#pragma GCC unroll 16
            for (size_t m = 0; m < Tokens; ++m) {
                const int8_t* q = x[m][first + s].q + 8 * j;
                if constexpr (kWide) {
                    half[m] = dot_wide(dot_wide(half[m], even, q), odd, q + 4);
                } else {
                    half[m] = dot(dot(half[m], even, q), odd, q + 4);
                }
            }
        }
        if constexpr (kKind.halves) {
            const Floats scale0 = format.scale(s, 0), scale1 = format.scale(s, 1);
#pragma GCC unroll 16
            for (size_t m = 0; m < Tokens; ++m) {
                const Floats sum = fused(to_floats(products[1][m]), scale1, times(to_floats(products[0][m]), scale0));
                sums[m] = fused(sum, splat_float(x[m][first + s].scale), sums[m]);
            }
        } else {
            const Floats scale = format.scale(s, 0);
#pragma GCC unroll 16
            for (size_t m = 0; m < Tokens; ++m)
                sums[m] = fused(times(to_floats(products[0][m]), splat_float(x[m][first + s].scale)), scale, sums[m]);
        }
        if constexpr (Format::kMinimums)
            for (size_t h = 0; h < kSums; ++h) {
                const Floats minimum = format.minimum(s, h);
#pragma GCC unroll 16
                for (size_t m = 0; m < Tokens; ++m)
                    sums[m] = fused_negative(minimum, splat_float(x[m][first + s].total[h]), sums[m]);
            }
    }
}

template <class Format, size_t Tokens>
void dot_tokens(const PanelTask& task, size_t first_token) {
    const bool ahead = first_token == 0;
    const size_t slabs = (task.columns + kSlab - 1) / kSlab;
    const ActivationSlab* x[Tokens];
    for (size_t m = 0; m < Tokens; ++m) x[m] = static_cast<const ActivationSlab*>(task.x[first_token + m]);
    for (size_t p = 0; p < task.panels; ++p) {
        const uint8_t* block = task.weights + p * task.panel_stride;
        Floats sums[Tokens];
        for (Floats& sum : sums) sum = zero_floats();
        for (size_t s = 0; s < slabs; s += kSlabs, block += superblock_bytes(Format::kQuant))
            add_superblock<Format, Tokens>(block, std::min(kSlabs, slabs - s), x, s, ahead, sums);
        for (size_t m = 0; m < Tokens; ++m)
            store_floats(task.y + (first_token + m) * task.y_stride + p * kPanelRows, sums[m]);
    }
}

// Calls Body<Tokens>::run(task, first token) for passes that together serve all tokens, none of more than Most. Kernels
// are made for few sizes of pass, for each takes a while to compile: 5 and 7 tokens make two passes.
template <template <size_t> class Body, size_t Most>
inline void for_passes(const PanelTask& task) {
    for (size_t first = 0; first < task.tokens;) {
        const size_t left = std::min(task.tokens - first, Most);
        const auto pass = [&]<size_t Tokens>() {
            if constexpr (Tokens <= Most) Body<Tokens>::run(task, first);
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

template <class Format>
struct Dot {
    template <size_t Tokens>
    struct Pass {
        static void run(const PanelTask& task, size_t first) { dot_tokens<Format, Tokens>(task, first); }
    };
};

// One panel serves all tokens before the next is touched, so that it comes from memory once.
template <class Format>
void dot_panels(const PanelTask& task) {
    for (size_t p = 0; p < task.panels; ++p) {
        PanelTask one = task;
        one.weights += p * task.panel_stride;
        one.panels = 1;
        one.y += p * kPanelRows;
        for_passes<Dot<Format>::template Pass, kMaxTokens>(one);
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
        if (first_token == 0) prefetch<slab_bytes(Format::kQuant)>(block + s * slab_bytes(Format::kQuant));
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
        PanelTask one = task;
        one.weights += p * task.panel_stride;
        one.panels = 1;
        one.y += p * kPanelRows;
        for_passes<Exact<Format>::template Pass, std::min<size_t>(kMaxTokens, 4)>(one);
    }
}

}  // namespace
}  // namespace ktqueue
