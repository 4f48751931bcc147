// The AVX-512 kernels with tiles in plain C++ from 5 tokens on, so that code for AMX is driven without AMX. Compiled
// with flags for AVX-512 and its BF16 instructions, so nothing compiled here may be shared with other files.
#include "../tiles_emulated.h"
#include "kernel_table.h"
// Lanes first, then what is written in them.
#include "lanes_avx512.h"
#include "tile_kernels.h"

namespace ktqueue {

namespace {

constexpr PanelKernel kTiles[kQuantCount] = {
    tile_panels<PanelF32, EmulatedTiles>,    tile_panels<PanelF16, EmulatedTiles>,
    tile_panels<PanelBF16, EmulatedTiles>,   tile_panels<PanelQ4_0, EmulatedTiles>,
    tile_panels<PanelQ8_0, EmulatedTiles>,   tile_panels<PanelQ2_K, EmulatedTiles>,
    tile_panels<PanelQ3_K, EmulatedTiles>,   tile_panels<PanelQ4_K, EmulatedTiles>,
    tile_panels<PanelQ5_K, EmulatedTiles>,   tile_panels<PanelQ6_K, EmulatedTiles>,
    tile_panels<PanelIQ4_NL, EmulatedTiles>, tile_panels<PanelIQ4_XS, EmulatedTiles>,
    tile_panels<PanelMXFP4, EmulatedTiles>};

}  // namespace

const KernelTable& emulated_kernels() {
    static const KernelTable kTable = [] {
        KernelTable table = avx512_kernels();
        table.isa = "emulated";
        for (size_t i = 0; i < kQuantCount; ++i) table.tile[i] = kTiles[i];
        table.tile_tokens = 5;
        return table;
    }();
    return kTable;
}

}  // namespace ktqueue
