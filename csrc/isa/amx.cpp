// Kernels for AMX: those of AVX-512, plus tiles for weights that many rows share. Compiled with the flags of AVX-512,
// so nothing compiled here may be shared with other files.
#include "isa/cpu_features.h"
#include "isa/ladder.h"
#include "isa/lanes_avx512.h"
#include "isa/vector_avx512.h"
// Kernels are written with the lanes and vectors above, so they follow.
#include "isa/tiles_amx.h"
#include "kernels/tile_kernels.h"

namespace ktqueue {

namespace {

// From this many BF16 rows on, tiles are used. On an Emerald Rapids, half a tile of tokens (8) was 3.4 times as fast as
// the float kernel (2 times with weights from memory); 16 tokens 6 times; 32 and more 7 to 8 times.
constexpr size_t kTokens = 8;
// The same for block formats, by Quant: from where whole layers gain (ADR 0012). 0: never.
constexpr size_t kBlockFormatTokens[kQuantCount] = {0,  0,  0,  48, 96, 24, 24, 24, 24, 32, 32, 32, 24,
                                                    24, 24, 24, 32, 32, 24, 24, 32, 48, 24, 48, 8,  32};

}  // namespace

const KernelTable& amx_kernels() {
    static const KernelTable kTable = [] {
        KernelTable table = avx512_kernels();
        table.isa = "amx";
        table.tiles[static_cast<size_t>(Quant::BF16)] = bf16_tile_panels<AmxTiles>;
        table.tile_tokens[static_cast<size_t>(Quant::BF16)] = kTokens;
        if (has_avx512_halves()) add_block_tiles<AmxTiles, FullHalf>(table, kBlockFormatTokens);
        return table;
    }();
    return kTable;
}

}  // namespace ktqueue
