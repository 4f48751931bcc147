// Panels times many rows on matrix tiles (AMX), with bf16 rows and weights rounded to bf16, sums in float32.
// Included only by translation units of one instruction set, after lanes_avx512.h; internal linkage.
//
// `Tiles` is what has the eight tiles, each of up to 16 rows of 64 bytes:
//   configure(rows)        gives tile i rows[i] rows of 64 bytes, all zero
//   zero<T>(), load<T>(source, stride), store<T>(target, stride)     strides in bytes
//   dot<C, A, B>()         C[m][n] += A[m][2k] * B[k][2n] + A[m][2k + 1] * B[k][2n + 1] summed over k
//   release()
//
// A slab of a panel, unpacked to bf16, is one tile (tile_weights.h); so are 32 columns of 16 rows of x as they lie.
// Two panels and 32 tokens make a pass: four sums, and a slab of it is four loads for four products. While the passes
// over a superblock of two panels run, the next superblock is unpacked a slab at a time between the products, into the
// other half of a buffer that stays in the first-level cache (32 KB).
//
// Cycles of one 16 x 32 tile of weights, estimated for Sapphire and Emerald Rapids: 16 a product and 8 a load from the
// first-level cache (Intel's optimization manual), so 16 for 16 tokens; unpacking is 130 to 190 instructions for ports 0
// and 5, so 65 to 95. Both overlap, so up to 64 tokens unpacking is the limit, and the arithmetic beyond.
#pragma once

#include <algorithm>

#include "kernel_table.h"
#include "panel_format.h"
// Uses the formats above.
#include "tile_weights.h"

namespace ktqueue {
namespace {

constexpr size_t kTileRows = 16;     // tokens
constexpr size_t kTileBytes = 1024;  // 16 rows of 64
constexpr size_t kPassTokens = 2 * kTileRows;
constexpr size_t kMaxBlockTokens = 256;         // that share an unpacked superblock
constexpr size_t kMaxBlockBytes = 1024 * 1024;  // of their x, which every two panels read again: half the second level

// A superblock of one or two panels.
struct TileChunk {
    size_t panel, panels;  // no panels: past the end
    size_t first, slabs;   // of the panel
    const uint8_t* block;  // of the first panel; the other's is a panel stride away
};

template <class Format, class Tiles>
class TileBlock {
  public:
    // Tokens first .. first + count - 1, count <= kMaxBlockTokens.
    TileBlock(const PanelTask& task, size_t first, size_t count)
        : task_(task),
          slabs_((task.columns + kSlab - 1) / kSlab),
          x_(static_cast<const uint8_t*>(task.x[first])),
          x_stride_(task.tokens > 1 ? static_cast<const uint8_t*>(task.x[1]) - static_cast<const uint8_t*>(task.x[0])
                                    : 0),
          y_(task.y + first * task.y_stride),
          tokens_(count) {}

    void run() {
        TileChunk chunk = at(0, 0);
        begin_unpacking(chunk);
        while (unit_ < units_) unpack();
        for (; chunk.panels != 0; chunk = unpacking_) {
            begin_unpacking(following(chunk));
            if (chunk.panels == 2) {
                passes<2>(chunk);
            } else {
                passes<1>(chunk);
            }
        }
    }

  private:
    // bf16 panels are tiles already.
    static constexpr bool kUnpacked = Format::kQuant == Quant::BF16;

    TileChunk at(size_t panel, size_t first) const {
        if (panel >= task_.panels) return {panel, 0, 0, 0, task_.weights};
        return {panel, std::min<size_t>(2, task_.panels - panel), first, std::min(kSlabs, slabs_ - first),
                task_.weights + panel * task_.panel_stride + first / kSlabs * superblock_bytes(Format::kQuant)};
    }

    TileChunk following(const TileChunk& chunk) const {
        const size_t next = chunk.first + chunk.slabs;
        return next < slabs_ ? at(chunk.panel, next) : at(chunk.panel + chunk.panels, 0);
    }

    void begin_unpacking(const TileChunk& chunk) {
        unpacking_ = chunk;
        prefetching_ = kUnpacked ? chunk : following(chunk);
        buffer_ ^= 1;
        unit_ = 0;
        units_ = chunk.panels * chunk.slabs;
    }

    // The next slab of the chunk being unpacked, and a prefetch of as much of the one after it.
    void unpack() {
        const size_t panel = unpacking_.panels == 2 ? unit_ % 2 : 0;
        const size_t slab = unpacking_.panels == 2 ? unit_ / 2 : unit_;
        ++unit_;
        const uint8_t* ahead = prefetching_.block + panel * task_.panel_stride + slab * slab_bytes(Format::kQuant);
        for (size_t i = 0; i < slab_bytes(Format::kQuant) + 8; i += 64) __builtin_prefetch(ahead + i, 0, 3);
        if constexpr (!kUnpacked) {
            const Format format(unpacking_.block + panel * task_.panel_stride, unpacking_.slabs);
            store_tile(format, slab, weights_[buffer_][panel][slab]);
        }
    }

    template <size_t Panels>
    void passes(const TileChunk& chunk) {
        const size_t count = (tokens_ + kPassTokens - 1) / kPassTokens;
        const size_t steps = count * chunk.slabs;
        const bool alone = count == 1;  // then the sums stay in their tiles
        for (size_t token = 0; token < tokens_; token += kPassTokens) {
            const size_t rows = std::min(kPassTokens, tokens_ - token);
            configure(rows);
            if (rows > kTileRows) {
                pass<Panels, 2>(chunk, token, steps, alone);
            } else {
                pass<Panels, 1>(chunk, token, steps, alone);
            }
        }
    }

    void configure(size_t rows) {
        if (rows == configured_) return;
        configured_ = rows;
        const auto upper = static_cast<uint8_t>(std::min(rows, kTileRows));
        const auto lower = static_cast<uint8_t>(rows > kTileRows ? rows - kTileRows : kTileRows);
        Tiles::configure({upper, lower, upper, lower, upper, lower, kTileRows, kTileRows});
    }

    // sums (tiles 0 to 3: panel * 2 + half of the tokens) += x (tiles 4 and 5) * weights (tiles 6 and 7).
    template <size_t Panels, size_t Halves>
    void pass(const TileChunk& chunk, size_t token, size_t steps, bool alone) {
        if (chunk.first == 0) {
            for_sums<Panels, Halves>([&]<int T>(size_t, size_t) { Tiles::template zero<T>(); });
        } else if (!alone) {
            for_sums<Panels, Halves>(
                [&]<int T>(size_t panel, size_t half) { Tiles::template load<T>(sums(token, panel, half), 64); });
        }
        const uint8_t* x = x_ + token * x_stride_ + chunk.first * 64;
        const uint8_t* lower_x = x + kTileRows * x_stride_;
        const uint8_t* weights = kUnpacked ? chunk.block : weights_[buffer_ ^ 1][0][0];
        const uint8_t* other = kUnpacked ? chunk.block + task_.panel_stride : weights_[buffer_ ^ 1][1][0];
        for (size_t s = 0; s < chunk.slabs; ++s) {
            Tiles::template load<4>(x + s * 64, x_stride_);
            Tiles::template load<6>(weights + s * kTileBytes, 64);
            Tiles::template dot<0, 4, 6>();
            if constexpr (Panels == 2) {
                Tiles::template load<7>(other + s * kTileBytes, 64);
                Tiles::template dot<2, 4, 7>();
            }
            if constexpr (Halves == 2) {
                Tiles::template load<5>(lower_x + s * 64, x_stride_);
                Tiles::template dot<1, 5, 6>();
                if constexpr (Panels == 2) Tiles::template dot<3, 5, 7>();
            }
            for (due_ += units_; due_ >= steps; due_ -= steps) unpack();  // spread evenly over the steps
        }
        if (chunk.first + chunk.slabs == slabs_) {
            for_sums<Panels, Halves>([&]<int T>(size_t panel, size_t half) {
                float* y = y_ + (token + half * kTileRows) * task_.y_stride + (chunk.panel + panel) * kPanelRows;
                Tiles::template store<T>(y, task_.y_stride * sizeof(float));
            });
        } else if (!alone) {
            for_sums<Panels, Halves>(
                [&]<int T>(size_t panel, size_t half) { Tiles::template store<T>(sums(token, panel, half), 64); });
        }
    }

    template <size_t Panels, size_t Halves, class Body>
    static void for_sums(Body body) {
        body.template operator()<0>(0, 0);
        if constexpr (Halves == 2) body.template operator()<1>(0, 1);
        if constexpr (Panels == 2) body.template operator()<2>(1, 0);
        if constexpr (Panels == 2 && Halves == 2) body.template operator()<3>(1, 1);
    }

    float* sums(size_t token, size_t panel, size_t half) { return sums_[token / kTileRows + half][panel]; }

    const PanelTask& task_;
    size_t slabs_;
    const uint8_t* x_;
    size_t x_stride_;  // bytes
    float* y_;
    size_t tokens_;
    size_t configured_ = 0;

    TileChunk unpacking_, prefetching_;
    size_t buffer_ = 1;            // that is being unpacked into
    size_t unit_ = 0, units_ = 0;  // slabs unpacked and to unpack
    size_t due_ = 0;               // unpacked slabs owed, times steps

    alignas(64) uint8_t weights_[2][2][kSlabs][kTileBytes];                   // [buffer][panel]
    alignas(64) float sums_[kMaxBlockTokens / kTileRows][2][kTileBytes / 4];  // [16 tokens][panel]
};

// Tokens in blocks as equal as can be, each small enough that its x stays in the second-level cache.
template <class Format, class Tiles>
void tile_panels(const PanelTask& task) {
    const size_t row_bytes = (task.columns + kSlab - 1) / kSlab * kSlab * sizeof(uint16_t);
    const size_t fitting = kMaxBlockBytes / row_bytes / kPassTokens * kPassTokens;
    const size_t most = std::clamp(fitting, 2 * kPassTokens, kMaxBlockTokens);
    const size_t blocks = (task.tokens + most - 1) / most;
    const size_t tokens = round_up((task.tokens + blocks - 1) / blocks, kPassTokens);
    for (size_t first = 0; first < task.tokens; first += tokens)
        TileBlock<Format, Tiles>(task, first, std::min(tokens, task.tokens - first)).run();
    Tiles::release();
}

}  // namespace
}  // namespace ktqueue
