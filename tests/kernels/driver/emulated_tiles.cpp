// The AVX-512 kernels with tiles in plain C++ from a few tokens on, so that code for AMX runs without AMX. Compiled
// with the flags of AVX-512, so nothing compiled here may be shared with other files.
#include "../tiles_emulated.h"
#include "isa/ladder.h"
#include "isa/lanes_avx512.h"
#include "isa/vector_avx512.h"
// Kernels are written with the lanes and vectors above, so they follow.
#include "kernels/tile_kernels.h"

namespace ktqueue {

const KernelTable& emulated_kernels() {
    static const KernelTable kTable = [] {
        KernelTable table = avx512_kernels();
        table.isa = "emulated";
        table.tiles[static_cast<size_t>(Quant::BF16)] = bf16_tile_panels<EmulatedTiles>;
        table.tile_tokens[static_cast<size_t>(Quant::BF16)] = 5;
        constexpr size_t kTokens[kQuantCount] = {0, 0, 0, 5, 9, 6, 6, 5, 7, 5, 5, 5, 5,
                                                 5, 6, 5, 7, 5, 5, 6, 5, 6, 5, 6, 4, 5};
        add_block_tiles<EmulatedTiles, EmulatedHalf>(table, kTokens);
        return table;
    }();
    return kTable;
}

}  // namespace ktqueue
