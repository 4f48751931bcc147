// The AVX-512 kernels with tiles in plain C++ from 5 tokens on, so that code for AMX is driven without AMX. Compiled
// with the flags of AVX-512, so nothing compiled here may be shared with other files.
#include "../tiles_emulated.h"
#include "kernel_table.h"
#include "lanes_avx512.h"
// What is written in lanes comes after them.
#include "bf16_tiles.h"

namespace ktqueue {

const KernelTable& emulated_kernels() {
    static const KernelTable kTable = [] {
        KernelTable table = avx512_kernels();
        table.isa = "emulated";
        table.bf16_tiles = bf16_tile_panels<EmulatedTiles>;
        table.tile_tokens = 5;
        return table;
    }();
    return kTable;
}

}  // namespace ktqueue
