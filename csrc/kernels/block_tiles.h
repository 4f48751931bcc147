// Panels of block formats times many rows on matrix tiles (AMX). Included only by translation units of one instruction
// set, after kernels/bf16_tiles.h; internal linkage.
//
// Superblock by superblock of two panels: 16 KB of bf16 in the first-level cache serve all rows, and between their
// products the next superblock is unpacked. Sums wait in tiles' form beside it, and go to y after the last one. Rows are
// taken 16 at a time; the last 16 may begin among those before, which then come out twice, the same bit for bit.
#pragma once

#include "kernels/bf16_tiles.h"
#include "kernels/bf16_weights.h"

namespace ktqueue {
namespace {

constexpr size_t kBlockTokens = 256;  // that an unpacked superblock serves
constexpr size_t kSlabBytes = 64;     // of a row of x

// What the passes know of a format.
struct SlabSource {
    void (*unpack)(const uint8_t* block, size_t slabs, size_t slab, float unit, uint8_t* tile);
    size_t superblock_bytes, slab_bytes;
};

// The panels of a task times some of its tokens, at most kBlockTokens.
template <class Tiles>
class BlockTiles {
  public:
    BlockTiles(const PanelTask& task, const SlabSource& source, size_t first, size_t tokens)
        : task_(task),
          source_(source),
          slabs_((task.columns + kSlab - 1) / kSlab),
          blocks_((slabs_ + kSlabs - 1) / kSlabs),
          rows_(std::min(tokens, kTileTokens)),
          tokens_(tokens),
          halves_((tokens + rows_ - 1) / rows_),
          x_(static_cast<const uint8_t*>(task.x[first])),
          x_stride_(x_distance(task)),
          y_(task.y + first * task.y_stride),
          fetch_(first == 0) {}

    void run() {
        const auto rows = static_cast<uint8_t>(rows_);
        Tiles::configure({rows, rows, rows, rows, rows, rows, 16, 16});
        Place at{0, 0};
        Unpacking next(*this, at, unpacked_[0]);
        for (size_t turn = 0; at.panel < task_.panels; turn ^= 1, at = after(at)) {
            next.finish();
            next = Unpacking(*this, after(at), unpacked_[turn ^ 1]);
            const size_t steps = (halves_ + 1) / 2 * slabs_of(at);
            next.share = (next.units + steps - 1) / steps;
            for (size_t half = 0; half < halves_; half += 2) {
                const bool two = halves_ - half > 1;
                if (task_.panels - at.panel > 1) {
                    two ? pass<2, 2>(at, half, unpacked_[turn], next) : pass<2, 1>(at, half, unpacked_[turn], next);
                } else {
                    two ? pass<1, 2>(at, half, unpacked_[turn], next) : pass<1, 1>(at, half, unpacked_[turn], next);
                }
            }
        }
    }

  private:
    struct Place {
        size_t panel, block;
    };

    static size_t x_distance(const PanelTask& task) {
        if (task.tokens == 1) return 0;
        return static_cast<size_t>(static_cast<const uint8_t*>(task.x[1]) - static_cast<const uint8_t*>(task.x[0]));
    }

    Place after(Place at) const {
        return at.block + 1 < blocks_ ? Place{at.panel, at.block + 1} : Place{at.panel + 2, 0};
    }
    size_t slabs_of(Place at) const { return std::min(kSlabs, slabs_ - at.block * kSlabs); }
    size_t first_row(size_t half) const { return std::min(half * rows_, tokens_ - rows_); }

    // The superblocks of two panels (or one) at a place, slab by slab; beyond the last panel nothing.
    struct Unpacking {
        const BlockTiles* owner;
        Place at;
        uint8_t* target;
        size_t slabs, units, done = 0, share = 0;

        Unpacking(const BlockTiles& from, Place at, uint8_t* target)
            : owner(&from),
              at(at),
              target(target),
              slabs(from.slabs_of(at)),
              units(at.panel < from.task_.panels ? slabs * std::min<size_t>(2, from.task_.panels - at.panel) : 0) {}

        void unpack_one() {
            const PanelTask& task = owner->task_;
            const SlabSource& source = owner->source_;
            const size_t panel = done / slabs, slab = done % slabs;
            const uint8_t* block =
                task.weights + (at.panel + panel) * task.panel_stride + at.block * source.superblock_bytes;
            if (owner->fetch_)  // the same place of the next panels, to the second-level cache
                for (size_t i = 0; i < source.slab_bytes; i += 64)
                    __builtin_prefetch(block + 2 * task.panel_stride + slab * source.slab_bytes + i, 0, 2);
            source.unpack(block, slabs, slab, task.unit, target + (panel * kSlabs + slab) * kTileBytes);
            ++done;
        }
        void step() {
            for (size_t i = 0; i < share && done < units; ++i) unpack_one();
        }
        void finish() {
            while (done < units) unpack_one();
        }
    };

    // sums (tiles 0 to 3: panel * 2 + half) += x (tiles 4 and 5) * weights (tiles 6 and 7).
    template <size_t Panels, size_t Halves>
    void pass(Place at, size_t half, const uint8_t* weights, Unpacking& next) {
        const bool first = at.block == 0, last = at.block + 1 == blocks_;
        float* sums = sums_ + half * 2 * kTileFloats;  // [half][panel]
        for_sums<Panels, Halves>([&]<int T>(size_t p, size_t h) {
            if (first) {
                Tiles::template zero<T>();
            } else {
                Tiles::template load<T>(sums + (2 * h + p) * kTileFloats, 64);
            }
        });
        if (last)  // y is about to be written, by no one for a while: a line is fetched long before its store is due
            for (size_t h = 0; h < Halves; ++h)
                for (size_t r = 0; r < rows_; ++r) {
                    const float* y = y_ + (first_row(half + h) + r) * task_.y_stride + at.panel * kPanelRows;
                    for (size_t p = 0; p < Panels; ++p) __builtin_prefetch(y + p * kPanelRows, 1, 3);
                }
        const uint8_t* upper = x_ + first_row(half) * x_stride_ + at.block * kSlabs * kSlabBytes;
        const uint8_t* lower = upper + (first_row(half + Halves - 1) - first_row(half)) * x_stride_;
        const uint8_t* other = weights + kSlabs * kTileBytes;
        for (size_t s = 0; s < slabs_of(at); ++s) {
            Tiles::template load<4>(upper + s * kSlabBytes, x_stride_);
            Tiles::template load<6>(weights + s * kTileBytes, 64);
            Tiles::template dot_bf16<0, 4, 6>();
            if constexpr (Halves == 2) {
                Tiles::template load<5>(lower + s * kSlabBytes, x_stride_);
                Tiles::template dot_bf16<1, 5, 6>();
            }
            if constexpr (Panels == 2) {
                Tiles::template load<7>(other + s * kTileBytes, 64);
                Tiles::template dot_bf16<2, 4, 7>();
                if constexpr (Halves == 2) Tiles::template dot_bf16<3, 5, 7>();
            }
            next.step();
        }
        for_sums<Panels, Halves>([&]<int T>(size_t p, size_t h) {
            if (last) {
                float* y = y_ + first_row(half + h) * task_.y_stride + (at.panel + p) * kPanelRows;
                Tiles::template store<T>(y, task_.y_stride * sizeof(float));
            } else {
                Tiles::template store<T>(sums + (2 * h + p) * kTileFloats, 64);
            }
        });
    }

    static constexpr size_t kTileFloats = kTileBytes / sizeof(float);

    const PanelTask& task_;
    const SlabSource& source_;
    size_t slabs_, blocks_, rows_, tokens_, halves_;
    const uint8_t* x_;
    size_t x_stride_;  // bytes
    float* y_;
    bool fetch_;
    alignas(64) uint8_t unpacked_[2][2 * kSlabs * kTileBytes];  // [panel][slab] tiles, in turn
    alignas(64) float sums_[kBlockTokens / kTileTokens * 2 * kTileFloats];
};

template <class Tiles, class Half, class Format>
void block_tile_panels(const PanelTask& task) {
    static constexpr SlabSource kSource{unpack_slab<Half, Format>, superblock_bytes(Format::kQuant),
                                        slab_bytes(Format::kQuant)};
    for (size_t first = 0; first < task.tokens; first += kBlockTokens)
        BlockTiles<Tiles>(task, kSource, first, std::min(kBlockTokens, task.tokens - first)).run();
    Tiles::release();
}

// The block formats' entries of a table, and how rows are made ready for them. `tokens`: from how many each pays, by Quant.
template <class Tiles, class Half>
void add_block_tiles(KernelTable& table, const size_t (&tokens)[kQuantCount]) {
    const auto add = [&](auto... formats) {
        const auto one = [&]<class Format>(std::type_identity<Format>) {
            const auto index = static_cast<size_t>(Format::kQuant);
            table.tiles[index] = tokens[index] ? block_tile_panels<Tiles, Half, Format> : nullptr;
            table.tile_tokens[index] = tokens[index];
        };
        (one(formats), ...);
    };
    add(std::type_identity<PanelQ4_0>{}, std::type_identity<PanelQ8_0>{}, std::type_identity<PanelQ2_K>{},
        std::type_identity<PanelQ3_K>{}, std::type_identity<PanelQ4_K>{}, std::type_identity<PanelQ5_K>{},
        std::type_identity<PanelQ6_K>{}, std::type_identity<PanelIQ4_NL>{}, std::type_identity<PanelIQ4_XS>{},
        std::type_identity<PanelMXFP4>{});
    table.shuffle = shuffle;
    table.mid_tiles[0] = mid_tile_rows<quick_silu>;
    table.mid_tiles[1] = mid_tile_rows<gate_gelu>;
    table.mid_tiles[2] = mid_tile_rows<gate_gelu_tanh>;
    table.mid_tiles[3] = mid_tile_rows<gate_swiglu_clamped>;
}

}  // namespace
}  // namespace ktqueue
