// Kernels for AVX2, FMA and F16C. Compiled with those flags, so nothing compiled here may be shared with other files.
#include "isa/lanes_avx2.h"
#include "isa/vector_avx2.h"
// Needs the vectors above.
#include "isa/vector_wide8.h"
// Builds the table from the lanes and vectors above.
#include "isa/ladder.h"
#include "isa/table.h"

namespace ktqueue {

const KernelTable& avx2_kernels() {
    static constexpr KernelTable kTable = make_table("avx2");
    return kTable;
}

}  // namespace ktqueue
