// Panels times many rows on AMX tiles: bf16 rows, sums in float32. Rounding differs from the kernels without tiles.
// Included only by translation units of one instruction set, after isa/lanes_avx512.h and isa/vector_avx512.h; internal
// linkage. `Tiles` gives access to the eight tiles, `Half` to arithmetic on halves (isa/tiles_amx.h).
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/kernel_table.h"
#include "kernels/panel_kernels.h"
#include "kernels/tile_operands.h"

namespace ktqueue {
namespace {

// ---- panels of BF16
//
// A slab of a panel is one tile as it is stored, and so are 32 columns of 16 rows of x. A pass takes two panels and 32
// tokens: four sums, and four loads for four products per slab.

constexpr size_t kTileTokens = 16;   // rows of the tiles that hold x and sums
constexpr size_t kTileBytes = 1024;  // 16 rows of 64
constexpr size_t kPassTokens = 2 * kTileTokens;

// Calls body<T>(panel, half) for each sum of a pass. Its tile T is panel * 2 + half, where half is 0 or 1 of the
// tokens.
template <size_t Panels, size_t Halves, class Body>
inline void for_sums(Body body) {
    body.template operator()<0>(0, 0);
    if constexpr (Halves == 2) body.template operator()<1>(0, 1);
    if constexpr (Panels == 2) body.template operator()<2>(1, 0);
    if constexpr (Panels == 2 && Halves == 2) body.template operator()<3>(1, 1);
}

// Multiplies one or two panels by 1 to 32 tokens, over all columns.
template <class Tiles>
class Bf16Pass {
  public:
    // Starts at this panel and this token of the task.
    Bf16Pass(const PanelTask& task, size_t panel, size_t first)
        : slabs_((task.columns + kSlab - 1) / kSlab),
          weights_(task.weights + panel * task.panel_stride),
          panel_stride_(task.panel_stride),
          x_(static_cast<const uint8_t*>(task.x[first])),
          x_stride_(task.tokens > 1 ? static_cast<const uint8_t*>(task.x[1]) - static_cast<const uint8_t*>(task.x[0])
                                    : 0),
          y_(task.y + first * task.y_stride + panel * kPanelRows),
          y_stride_(task.y_stride),
          ahead_(first == 0 ? 2 * task.panel_stride : 0) {}

    // sums (tiles 0 to 3: panel * 2 + half of the tokens) += x (tiles 4 and 5) * weights (tiles 6 and 7).
    template <size_t Panels, size_t Halves>
    void run() const {
        for_sums<Panels, Halves>([&]<int T>(size_t, size_t) { Tiles::template zero<T>(); });
        const uint8_t *other = weights_ + panel_stride_, *lower_x = x_ + kTileTokens * x_stride_;
        for (size_t s = 0; s < slabs_; ++s) {
            Tiles::template load<4>(x_ + s * 64, x_stride_);
            Tiles::template load<6>(weights_ + s * kTileBytes, 64);
            Tiles::template dot_bf16<0, 4, 6>();
            if constexpr (Panels == 2) {
                Tiles::template load<7>(other + s * kTileBytes, 64);
                Tiles::template dot_bf16<2, 4, 7>();
            }
            if constexpr (Halves == 2) {
                Tiles::template load<5>(lower_x + s * 64, x_stride_);
                Tiles::template dot_bf16<1, 5, 6>();
                if constexpr (Panels == 2) Tiles::template dot_bf16<3, 5, 7>();
            }
            if (ahead_)  // the same place of the next panels
                for (size_t p = 0; p < Panels; ++p)
                    prefetch<kTileBytes, 2>(weights_ + p * panel_stride_ + s * kTileBytes + ahead_);
        }
        for_sums<Panels, Halves>([&]<int T>(size_t panel, size_t half) {
            float* y = y_ + half * kTileTokens * y_stride_ + panel * kPanelRows;
            Tiles::template store<T>(y, y_stride_ * sizeof(float));
        });
    }

  private:
    size_t slabs_;
    const uint8_t* weights_;
    size_t panel_stride_;
    const uint8_t* x_;
    size_t x_stride_;  // bytes
    float* y_;
    size_t y_stride_, ahead_;
};

// `rows` tokens, 1 to 32: the first 16 in tiles 0, 2 and 4, the others in 1, 3 and 5.
template <class Tiles>
void configure_bf16(size_t rows) {
    const auto upper = static_cast<uint8_t>(std::min(rows, kTileTokens));
    const auto lower = static_cast<uint8_t>(rows > kTileTokens ? rows - kTileTokens : kTileTokens);
    Tiles::configure({upper, lower, upper, lower, upper, lower, 16, 16});
}

// Two panels serve up to 128 tokens, which stay in the second-level cache, before the next two are loaded.
template <class Tiles>
void bf16_tile_panels(const PanelTask& task) {
    size_t configured = 0;
    const auto pass = [&](size_t panel, size_t first) {
        const size_t rows = std::min(kPassTokens, task.tokens - first);
        if (rows != configured) configure_bf16<Tiles>(configured = rows);
        const Bf16Pass<Tiles> tile_pass(task, panel, first);
        if (task.panels - panel > 1) {
            rows > kTileTokens ? tile_pass.template run<2, 2>() : tile_pass.template run<2, 1>();
        } else {
            rows > kTileTokens ? tile_pass.template run<1, 2>() : tile_pass.template run<1, 1>();
        }
    };
    for (size_t block = 0; block < task.tokens; block += 4 * kPassTokens)
        for (size_t panel = 0; panel < task.panels; panel += 2)
            for (size_t first = block; first < std::min(block + 4 * kPassTokens, task.tokens); first += kPassTokens)
                pass(panel, first);
    Tiles::release();
}

// ---- panels of block formats
//
// The work goes superblock by superblock, over two panels: 16 KB of bf16 in the first-level cache serve all rows, and
// the next superblock is unpacked between the products. Sums wait beside it in the layout of tiles, and are written to
// y after the last superblock. Rows are taken 16 at a time. The last 16 may overlap the previous ones; the rows
// computed twice get the same bits.

constexpr size_t kBlockTokens = 256;  // tokens that one unpacked superblock serves
constexpr size_t kSlabBytes = 64;     // bytes of a slab in a row of x

// What the passes need to know about a format.
struct SlabSource {
    void (*unpack)(const uint8_t* block, size_t slabs, size_t slab, float unit, uint8_t* tile);
    size_t superblock_bytes, slab_bytes;
};

// Multiplies the panels of a task by some of its tokens, at most kBlockTokens.
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
        Place place{0, 0};
        Unpacking next(*this, place, unpacked_[0]);
        for (size_t turn = 0; place.panel < task_.panels; turn ^= 1, place = after(place)) {
            next.finish();
            next = Unpacking(*this, after(place), unpacked_[turn ^ 1]);
            const size_t steps = (halves_ + 1) / 2 * slabs_of(place);
            next.share = (next.units + steps - 1) / steps;
            for (size_t half = 0; half < halves_; half += 2) {
                const bool two = halves_ - half > 1;
                if (task_.panels - place.panel > 1) {
                    two ? pass<2, 2>(place, half, unpacked_[turn], next)
                        : pass<2, 1>(place, half, unpacked_[turn], next);
                } else {
                    two ? pass<1, 2>(place, half, unpacked_[turn], next)
                        : pass<1, 1>(place, half, unpacked_[turn], next);
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

    Place after(Place place) const {
        return place.block + 1 < blocks_ ? Place{place.panel, place.block + 1} : Place{place.panel + 2, 0};
    }
    size_t slabs_of(Place place) const { return std::min(kSlabs, slabs_ - place.block * kSlabs); }
    size_t first_row(size_t half) const { return std::min(half * rows_, tokens_ - rows_); }

    // Unpacks the superblocks of two panels (or one) at a place, slab by slab. Does nothing beyond the last panel.
    struct Unpacking {
        const BlockTiles* owner;
        Place place;
        uint8_t* target;
        size_t slabs, units, done = 0, share = 0;

        Unpacking(const BlockTiles& from, Place place, uint8_t* target)
            : owner(&from),
              place(place),
              target(target),
              slabs(from.slabs_of(place)),
              units(place.panel < from.task_.panels ? slabs * std::min<size_t>(2, from.task_.panels - place.panel)
                                                    : 0) {}

        void unpack_one() {
            const PanelTask& task = owner->task_;
            const SlabSource& source = owner->source_;
            const size_t panel = done / slabs, slab = done % slabs;
            const uint8_t* block =
                task.weights + (place.panel + panel) * task.panel_stride + place.block * source.superblock_bytes;
            if (owner->fetch_)  // fetches the same place of the next panels into the second-level cache
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
    void pass(Place place, size_t half, const uint8_t* weights, Unpacking& next) {
        const bool first = place.block == 0, last = place.block + 1 == blocks_;
        float* sums = sums_ + half * 2 * kTileFloats;  // [half][panel]
        for_sums<Panels, Halves>([&]<int T>(size_t p, size_t h) {
            if (first) {
                Tiles::template zero<T>();
            } else {
                Tiles::template load<T>(sums + (2 * h + p) * kTileFloats, 64);
            }
        });
        if (last)  // y is written soon: request its cache lines long before the stores
            for (size_t h = 0; h < Halves; ++h)
                for (size_t r = 0; r < rows_; ++r) {
                    const float* y = y_ + (first_row(half + h) + r) * task_.y_stride + place.panel * kPanelRows;
                    for (size_t p = 0; p < Panels; ++p) __builtin_prefetch(y + p * kPanelRows, 1, 3);
                }
        const uint8_t* upper = x_ + first_row(half) * x_stride_ + place.block * kSlabs * kSlabBytes;
        const uint8_t* lower = upper + (first_row(half + Halves - 1) - first_row(half)) * x_stride_;
        const uint8_t* other = weights + kSlabs * kTileBytes;
        for (size_t s = 0; s < slabs_of(place); ++s) {
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
                float* y = y_ + first_row(half + h) * task_.y_stride + (place.panel + p) * kPanelRows;
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
    alignas(64) uint8_t unpacked_[2][2 * kSlabs * kTileBytes];  // [panel][slab] tiles; two buffers, used in turn
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

// Adds the block formats' entries to a table, with the kernels that prepare their rows. `tokens`: from how many tokens
// tiles pay off, by Quant.
template <class Tiles, class Half>
void add_block_tiles(KernelTable& table, const size_t (&tokens)[kQuantCount]) {
    const auto add = [&]<size_t... I>(std::index_sequence<I...>) {
        const auto add_format = [&]<Quant kQuant>(std::integral_constant<Quant, kQuant>) {
            if constexpr (!is_float(kQuant)) {
                constexpr size_t i = static_cast<size_t>(kQuant);
                table.tiles[i] = tokens[i] ? block_tile_panels<Tiles, Half, Panel<panel_format(kQuant)>> : nullptr;
                table.tile_tokens[i] = tokens[i];
            }
        };
        (add_format(std::integral_constant<Quant, static_cast<Quant>(I)>{}), ...);
    };
    add(std::make_index_sequence<kQuantCount>());
    table.shuffle = shuffle;
    table.activate_tiles[0] = activate_tile_rows<quick_silu>;
    table.activate_tiles[1] = activate_tile_rows<gate_gelu>;
    table.activate_tiles[2] = activate_tile_rows<gate_gelu_tanh>;
    table.activate_tiles[3] = activate_tile_rows<gate_swiglu_clamped>;
    table.activate_tiles[4] = activate_tile_rows<gate_silu_limited>;
}

}  // namespace
}  // namespace ktqueue
