// The kernels for AMX: those of AVX-512, and tiles where many rows share the weights. Compiled with the flags of AVX-512,
// so nothing compiled here may be shared with other files.
#include "kernel_table.h"
#include "lanes_avx512.h"
// What is written in lanes comes after them.
#include "bf16_tiles.h"
#include "tile_kernels.h"
#include "tiles_amx.h"

namespace ktqueue {

namespace {

constexpr PanelKernel kTiles[kQuantCount] = {
    nullptr,
    nullptr,
    bf16_tile_panels<AmxTiles>,
    tile_panels<PanelQ4_0, AmxTiles>,
    tile_panels<PanelQ8_0, AmxTiles>,
    tile_panels<PanelQ2_K, AmxTiles>,
    tile_panels<PanelQ3_K, AmxTiles>,
    tile_panels<PanelQ4_K, AmxTiles>,
    tile_panels<PanelQ5_K, AmxTiles>,
    tile_panels<PanelQ6_K, AmxTiles>,
    tile_panels<PanelIQ4_NL, AmxTiles>,
    tile_panels<PanelIQ4_XS, AmxTiles>,
    tile_panels<PanelMXFP4, AmxTiles>,
};

// Half a tile of tokens takes as long as a whole one: estimated one and a half times as fast as `dot`.
constexpr size_t kTokens = 8;

}  // namespace

const KernelTable& amx_kernels() {
    static const KernelTable kTable = [] {
        KernelTable table = avx512_kernels();
        table.isa = "amx";
        for (size_t i = 0; i < kQuantCount; ++i) table.tile[i] = kTiles[i];
        table.tile_tokens = kTokens;
        return table;
    }();
    return kTable;
}

}  // namespace ktqueue
