// BF16 panels times many rows on matrix tiles (AMX): bf16 rows, sums in float32, rounded otherwise than by the float
// kernels. Included only by translation units of one instruction set, after isa/lanes_avx512.h; internal linkage.
//
// `Tiles` is what has the eight tiles; see isa/tiles_amx.h. A slab of a panel is one tile as it lies, and so are 32 columns
// of 16 rows of x. Two panels and 32 tokens make a pass: four sums, and a slab of it is four loads for four products.
#pragma once

#include <algorithm>

#include "kernels/kernel_table.h"
#include "kernels/panel_kernels.h"

namespace ktqueue {
namespace {

constexpr size_t kTileTokens = 16;   // rows of the tiles that hold x and sums
constexpr size_t kTileBytes = 1024;  // 16 rows of 64
constexpr size_t kPassTokens = 2 * kTileTokens;

// body<T>(panel, half) for each sum of a pass, whose tile T is panel * 2 + half of the tokens.
template <size_t Panels, size_t Halves, class Body>
inline void for_sums(Body body) {
    body.template operator()<0>(0, 0);
    if constexpr (Halves == 2) body.template operator()<1>(0, 1);
    if constexpr (Panels == 2) body.template operator()<2>(1, 0);
    if constexpr (Panels == 2 && Halves == 2) body.template operator()<3>(1, 1);
}

// One or two panels times 1 to 32 tokens, over all columns.
template <class Tiles>
class Bf16Pass {
  public:
    // From this panel and this token of the task on.
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

// `rows` tokens, 1 to 32: the upper 16 in tiles 0, 2 and 4, the rest in 1, 3 and 5.
template <class Tiles>
void configure_bf16(size_t rows) {
    const auto upper = static_cast<uint8_t>(std::min(rows, kTileTokens));
    const auto lower = static_cast<uint8_t>(rows > kTileTokens ? rows - kTileTokens : kTileTokens);
    Tiles::configure({upper, lower, upper, lower, upper, lower, 16, 16});
}

// Two panels serve up to 128 tokens, which stay in the second-level cache, before the next are touched.
template <class Tiles>
void bf16_tile_panels(const PanelTask& task) {
    size_t configured = 0;
    const auto pass = [&](size_t panel, size_t first) {
        const size_t rows = std::min(kPassTokens, task.tokens - first);
        if (rows != configured) configure_bf16<Tiles>(configured = rows);
        const Bf16Pass<Tiles> one(task, panel, first);
        if (task.panels - panel > 1) {
            rows > kTileTokens ? one.template run<2, 2>() : one.template run<2, 1>();
        } else {
            rows > kTileTokens ? one.template run<1, 2>() : one.template run<1, 1>();
        }
    };
    for (size_t block = 0; block < task.tokens; block += 4 * kPassTokens)
        for (size_t panel = 0; panel < task.panels; panel += 2)
            for (size_t first = block; first < std::min(block + 4 * kPassTokens, task.tokens); first += kPassTokens)
                pass(panel, first);
    Tiles::release();
}

}  // namespace
}  // namespace ktqueue
