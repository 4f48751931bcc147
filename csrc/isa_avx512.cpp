// The kernels for AVX-512 (F, BW, DQ, VL, VNNI). Compiled with those flags, so nothing compiled here may be shared with other
// files.
#include "lanes_avx512.h"
#include "vector_avx512.h"
// The table is built of the lanes and vectors above.
#include "isa_table.h"

namespace ktqueue {

const KernelTable& avx512_kernels() {
    static constexpr KernelTable kTable = make_table("avx512");
    return kTable;
}

}  // namespace ktqueue
