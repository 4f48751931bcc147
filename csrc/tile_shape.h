// What a tile of AMX looks like.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktqueue {

inline constexpr size_t kTileTokens = 16;  // rows of the tiles that hold x and sums

struct TileShape {
    uint8_t rows;       // 1 to 16
    uint8_t row_bytes;  // 4 to 64
};

}  // namespace ktqueue
