// The kernels for AMX: those of AVX-512, and tiles where many rows share BF16 weights. Compiled with the flags of AVX-512,
// so nothing compiled here may be shared with other files.
#include "kernel_table.h"
#include "lanes_avx512.h"
// What is written in lanes comes after them.
#include "bf16_tiles.h"
#include "tiles_amx.h"

namespace ktqueue {

namespace {

// Half a tile of tokens takes as long as a whole one, and still, measured on an Emerald Rapids, 3.4 times as fast as the
// float kernel (twice where weights come from memory); 16 tokens 6 times, 32 and more 7 to 8 times.
constexpr size_t kTokens = 8;

}  // namespace

const KernelTable& amx_kernels() {
    static const KernelTable kTable = [] {
        KernelTable table = avx512_kernels();
        table.isa = "amx";
        table.bf16_tiles = bf16_tile_panels<AmxTiles>;
        table.tile_tokens = kTokens;
        return table;
    }();
    return kTable;
}

}  // namespace ktqueue
