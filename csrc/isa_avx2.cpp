// The AVX2 kernels. Compiled with -mavx2 -mfma -mf16c, so nothing compiled here may be shared with other files.
#include "quant_decode_avx2.h"
// The table is built of the decoders above.
#include "isa_table.h"

namespace ktqueue {

const KernelTable& avx2_kernels() {
    static constexpr KernelTable kTable = make_table("avx2");
    return kTable;
}

}  // namespace ktqueue
