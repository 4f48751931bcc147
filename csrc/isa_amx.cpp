// The kernels for AMX: those of AVX-512, and tiles where many rows share the weights. Compiled with flags for AVX-512
// and its BF16 instructions, so nothing compiled here may be shared with other files.
#include "kernel_table.h"
// Lanes first, then what is written in them.
#include "lanes_avx512.h"
#include "tile_kernels.h"
#include "tiles_amx.h"

namespace ktqueue {

namespace {

constexpr PanelKernel kTiles[kQuantCount] = {
    tile_panels<PanelF32, AmxTiles>,  tile_panels<PanelF16, AmxTiles>,    tile_panels<PanelBF16, AmxTiles>,
    tile_panels<PanelQ4_0, AmxTiles>, tile_panels<PanelQ8_0, AmxTiles>,   tile_panels<PanelQ2_K, AmxTiles>,
    tile_panels<PanelQ3_K, AmxTiles>, tile_panels<PanelQ4_K, AmxTiles>,   tile_panels<PanelQ5_K, AmxTiles>,
    tile_panels<PanelQ6_K, AmxTiles>, tile_panels<PanelIQ4_NL, AmxTiles>, tile_panels<PanelIQ4_XS, AmxTiles>,
    tile_panels<PanelMXFP4, AmxTiles>};

// Unpacking a tile of weights costs as much as 16 to 24 tokens' int8 products with it.
constexpr size_t kTileTokens = 24;

}  // namespace

const KernelTable& amx_kernels() {
    static const KernelTable kTable = [] {
        KernelTable table = avx512_kernels();
        table.isa = "amx";
        for (size_t i = 0; i < kQuantCount; ++i) table.tile[i] = kTiles[i];
        table.tile_tokens = kTileTokens;
        return table;
    }();
    return kTable;
}

}  // namespace ktqueue
