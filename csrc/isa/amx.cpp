// The kernels for AMX: those of AVX-512, and tiles where many rows share weights. Compiled with the flags of AVX-512, so
// nothing compiled here may be shared with other files.
#include "isa/cpu_features.h"
#include "isa/lanes_avx512.h"
#include "isa/vector_avx512.h"
#include "kernels/kernel_table.h"
// What is written in lanes and vectors comes after them.
#include "kernels/tile_rows.h"
// Uses the rows.
#include "isa/half_avx512.h"
#include "isa/tiles_amx.h"
#include "kernels/block_tiles.h"

namespace ktqueue {

namespace {

// BF16: half a tile of tokens takes as long as a whole one, and still, measured on an Emerald Rapids, 3.4 times as fast as
// the float kernel (twice where weights come from memory); 16 tokens 6 times, 32 and more 7 to 8 times.
constexpr size_t kTokens = 8;
// Of block formats, by Quant: from where whole layers gain (ADR 0012). 0: never.
constexpr size_t kBlockFormatTokens[kQuantCount] = {0, 0, 0, 48, 96, 24, 24, 24, 24, 32, 32, 32, 24};

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
