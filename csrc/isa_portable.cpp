// The plain C++ kernels: correct everywhere, fast nowhere.
#include "quant_decode_portable.h"
// The table is built of the decoders above.
#include "isa_table.h"

namespace ktqueue {

const KernelTable& portable_kernels() {
    static constexpr KernelTable kTable = make_table("scalar");
    return kTable;
}

}  // namespace ktqueue
