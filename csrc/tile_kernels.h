// Panels of block formats times many rows on matrix tiles (AMX): the integer products of panel_kernels.h by tiles, and
// then the same operations on floats in the same order, so that results equal those of `dot` bit for bit.
// Included only by translation units of one instruction set, after lanes_avx512.h; internal linkage.
//
// `Tiles` is what has the eight tiles; see tiles_amx.h. A slab's lines, made signed, are the eight rows of one operand (so
// no correction is due), 32 bytes of 16 tokens the other. The products pass through a buffer to the vector registers,
// where the 16 tokens' sums stay for a superblock. A product takes long, so it is begun two slabs before it is used.
// Two panels share a pass over the tokens' rows, and up to 64 tokens share what is unpacked of a superblock.
//
// Cycles of 16 rows x 32 columns x 16 tokens, estimated for Sapphire and Emerald Rapids: 48 or 64 vector operations (80 and
// 112 with a scale for 16) on ports 0 and 5, 16 stores and 12 to 20 loads of tile rows beside them: 28 to 60.
#pragma once

#include <algorithm>

#include "kernel_table.h"
#include "panel_format.h"
#include "panel_kernels.h"
#include "tile_shape.h"

namespace ktqueue {
namespace {

constexpr size_t kBlockTokens = 64;  // that share an unpacked superblock
constexpr size_t kChunkSlabs = 64;   // of x, gathered at once: 192 KB for 64 tokens, for the second-level cache
constexpr size_t kDotTokens = 6;     // fewer than that, left over, are quicker without tiles

// The same slab of 16 rows of x, side by side.
struct alignas(64) TokenSlab {
    int8_t q[kTileTokens][kSlab];
    struct {
        float scale, total[2];
        uint32_t padding;
    } rest[kTileTokens];  // ActivationSlab after q
};
static_assert(sizeof(TokenSlab) == kTileTokens * sizeof(ActivationSlab));

// A superblock of one panel as the products and sums want it.
struct alignas(64) UnpackedSuperblock {
    uint8_t lines[kSlabs][8][64];  // signed codes
    float scales[kSlabs][2][kPanelRows];
    float minimums[kSlabs][2][kPanelRows];
};

// 1 to 64 tokens of a task.
template <class Format, class Tiles>
class TileBlock {
  public:
    TileBlock(const PanelTask& task, size_t first, size_t tokens)
        : task_(task),
          slabs_((task.columns + kSlab - 1) / kSlab),
          tokens_(tokens),
          groups_((tokens + kTileTokens - 1) / kTileTokens),
          x_(task.x + first),
          y_(task.y + first * task.y_stride) {
        const size_t next = 2 * task.panel_stride;  // see panel_kernels.h
        ahead_ = first > 0 ? 0 : next <= kFarthestBytes ? next : kPrefetchBytes;
    }

    void run() {
        for (size_t first = 0; first < slabs_; first += kChunkSlabs) {
            const size_t end = std::min(first + kChunkSlabs, slabs_);
            gather(first, end);
            for (size_t panel = 0; panel < task_.panels; panel += 2) {
                const size_t panels = std::min<size_t>(2, task_.panels - panel);
                begin_sums(panel, panels, first == 0);
                for (size_t s = first; s < end; s += kSlabs)
                    add_superblock_of_panels(panel, panels, s, std::min(kSlabs, end - s), first);
                end_sums(panel, panels);
            }
        }
    }

  private:
    static constexpr bool kHalves = activation_kind(Format::kQuant).halves;

    // Rows beyond the last token are zero.
    void gather(size_t first, size_t end) {
        for (size_t group = 0; group < groups_; ++group)
            for (size_t s = first; s < end; ++s) {
                TokenSlab& to = gathered_[group][s - first];
                const size_t rows = std::min(kTileTokens, tokens_ - group * kTileTokens);
                for (size_t t = 0; t < rows; ++t) {
                    const ActivationSlab& from = static_cast<const ActivationSlab*>(x_[group * kTileTokens + t])[s];
                    std::memcpy(to.q[t], from.q, sizeof from.q);
                    std::memcpy(&to.rest[t], &from.scale, sizeof to.rest[t]);
                }
                for (size_t t = rows; t < kTileTokens; ++t) {
                    std::memset(to.q[t], 0, sizeof to.q[t]);
                    std::memset(&to.rest[t], 0, sizeof to.rest[t]);
                }
            }
    }

    void begin_sums(size_t panel, size_t panels, bool zero) {
        for (size_t p = 0; p < panels; ++p)
            for (size_t t = 0; t < groups_ * kTileTokens; ++t)
                store_floats(sums_[p][t], zero || t >= tokens_
                                              ? zero_floats()
                                              : load_floats(y_ + t * task_.y_stride + (panel + p) * kPanelRows));
    }

    void end_sums(size_t panel, size_t panels) {
        for (size_t p = 0; p < panels; ++p)
            for (size_t t = 0; t < tokens_; ++t)
                store_floats(y_ + t * task_.y_stride + (panel + p) * kPanelRows, load_floats(sums_[p][t]));
    }

    void add_superblock_of_panels(size_t panel, size_t panels, size_t first, size_t slabs, size_t chunk) {
        for (size_t p = 0; p < panels; ++p)
            unpack(task_.weights + (panel + p) * task_.panel_stride + first / kSlabs * superblock_bytes(Format::kQuant),
                   slabs, unpacked_[p]);
        for (size_t group = 0; group < groups_; ++group)
            for (size_t p = 0; p < panels; ++p)
                add(unpacked_[p], slabs, gathered_[group] + (first - chunk), sums_[p] + group * kTileTokens);
    }

    void unpack(const uint8_t* block, size_t slabs, UnpackedSuperblock& to) const {
        constexpr int kOffset = activation_kind(Format::kQuant).offset;
        const Format format(block, slabs);
        for (size_t s = 0; s < slabs; ++s) {
            if (ahead_) prefetch<slab_bytes(Format::kQuant), 2>(block + s * slab_bytes(Format::kQuant) + ahead_);
#pragma GCC unroll 4
            for (size_t j = 0; j < 4; ++j) {
                Bytes even, odd;
                format.lines(s, j, even, odd);
                store_signed<kOffset>(to.lines[s][2 * j], even);
                store_signed<kOffset>(to.lines[s][2 * j + 1], odd);
            }
            for (size_t h = 0; h <= kHalves; ++h) {
                store_floats(to.scales[s][h], format.scale(s, h));
                if constexpr (Format::kMinimums) store_floats(to.minimums[s][h], format.minimum(s, h));
            }
        }
    }

    template <int Offset>
    static void store_signed(uint8_t* target, Bytes codes) {
        if constexpr (Offset != 0) codes = _mm512_sub_epi8(codes, _mm512_set1_epi8(static_cast<char>(Offset)));
        _mm512_store_si512(target, codes);
    }

    // sums[16][16] += a superblock times 16 tokens.
    void add(const UnpackedSuperblock& weights, size_t slabs, const TokenSlab* x, float (*target)[kPanelRows]) {
        Floats sums[kTileTokens];
#pragma GCC unroll 16
        for (size_t m = 0; m < kTileTokens; ++m) sums[m] = load_floats(target[m]);
        multiply<0>(weights, x, 0);
        if (slabs > 1) multiply<1>(weights, x, 1);
        for (size_t s = 0; s < slabs; s += 2) {
            if (s + 2 < slabs) multiply<0>(weights, x, s + 2);
            add_products(weights, x[s], s, sums);
            if (s + 1 == slabs) break;
            if (s + 3 < slabs) multiply<1>(weights, x, s + 3);
            add_products(weights, x[s + 1], s + 1, sums);
        }
#pragma GCC unroll 16
        for (size_t m = 0; m < kTileTokens; ++m) store_floats(target[m], sums[m]);
    }

    // Products of slab s to their buffer. Slabs take turns with the tiles: `Turn` is 0 or 1.
    template <int Turn>
    void multiply(const UnpackedSuperblock& weights, const TokenSlab* x, size_t s) {
        if constexpr (kHalves) {
            multiply_half<2 * Turn, 4, 6>(weights.lines[s][0], x[s].q[0], products_[s % 4][0]);
            multiply_half<2 * Turn + 1, 5, 7>(weights.lines[s][4], x[s].q[0] + kSlab / 2, products_[s % 4][1]);
        } else {
            multiply_half<Turn, 4 + Turn, 6 + Turn>(weights.lines[s][0], x[s].q[0], products_[s % 4][0]);
        }
    }

    template <int C, int A, int B>
    static void multiply_half(const uint8_t* lines, const int8_t* q, int32_t (*products)[kPanelRows]) {
        Tiles::template load<A>(q, kSlab);
        Tiles::template load<B>(lines, 64);
        Tiles::template zero<C>();
        Tiles::template dot_int8<C, A, B>();
        Tiles::template store<C>(products, 64);
    }

    // As add_superblock() of panel_kernels.h.
    void add_products(const UnpackedSuperblock& weights, const TokenSlab& x, size_t s,
                      Floats (&sums)[kTileTokens]) const {
        const Floats scale = load_floats(weights.scales[s][0]), other = load_floats(weights.scales[s][kHalves]);
        const auto& products = products_[s % 4];
#pragma GCC unroll 16
        for (size_t m = 0; m < kTileTokens; ++m) {
            const Floats product = to_floats(_mm512_load_si512(products[0][m]));
            const Floats x_scale = splat_float(x.rest[m].scale);
            if constexpr (kHalves) {
                const Floats second = to_floats(_mm512_load_si512(products[1][m]));
                sums[m] = fused(fused(second, other, times(product, scale)), x_scale, sums[m]);
            } else {
                sums[m] = fused(times(product, x_scale), scale, sums[m]);
            }
            if constexpr (Format::kMinimums) {
                sums[m] = fused_negative(load_floats(weights.minimums[s][0]), splat_float(x.rest[m].total[0]), sums[m]);
                if constexpr (kHalves)
                    sums[m] =
                        fused_negative(load_floats(weights.minimums[s][1]), splat_float(x.rest[m].total[1]), sums[m]);
            }
        }
    }

    const PanelTask& task_;
    size_t slabs_, tokens_, groups_, ahead_;
    const void* const* x_;
    float* y_;

    alignas(64) int32_t products_[4][1 + kHalves][kTileTokens][kPanelRows];  // of slab s at s % 4, by half
    alignas(64) float sums_[2][kBlockTokens][kPanelRows];                    // [panel]
    UnpackedSuperblock unpacked_[2];                                         // [panel]
    TokenSlab gathered_[kBlockTokens / kTileTokens][kChunkSlabs];
};

template <class Format, class Tiles>
void tile_panels(const PanelTask& task) {
    const size_t rest = task.tokens % kTileTokens, tokens = task.tokens - (rest < kDotTokens ? rest : 0);
    constexpr uint8_t kLines = activation_kind(Format::kQuant).halves ? 4 : 8;
    constexpr TileShape kSums{kTileTokens, 64}, kX{kTileTokens, 4 * kLines}, kWeights{kLines, 64};
    if (tokens > 0) {
        Tiles::configure({kSums, kSums, kSums, kSums, kX, kX, kWeights, kWeights});
        for (size_t first = 0; first < tokens; first += kBlockTokens)
            TileBlock<Format, Tiles>(task, first, std::min(kBlockTokens, tokens - first)).run();
        Tiles::release();
    }
    if (tokens == task.tokens) return;
    PanelTask left = task;
    left.x += tokens;
    left.y += tokens * task.y_stride;
    left.tokens -= tokens;
    avx512_kernels().dot[static_cast<size_t>(Format::kQuant)](left);
}

}  // namespace
}  // namespace ktqueue
