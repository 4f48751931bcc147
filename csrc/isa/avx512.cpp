// Kernels for AVX-512 (F, BW, DQ, VL, VNNI). Compiled with those flags, so nothing compiled here may be shared with
// other files.
#include "isa/lanes_avx512.h"
#include "isa/vector_avx512.h"
// Builds the table from the lanes and vectors above.
#include "isa/ladder.h"
#include "isa/table.h"

namespace ktqueue {

const KernelTable& avx512_kernels() {
    static constexpr KernelTable kTable = make_table("avx512");
    return kTable;
}

}  // namespace ktqueue
