// The kernels in plain C++, for any CPU.
#include "lanes_scalar.h"
#include "vector_portable.h"
// Needs the vectors above.
#include "vector_wide8.h"
// The table is built of the lanes and vectors above.
#include "isa_table.h"

namespace ktqueue {

const KernelTable& portable_kernels() {
    static constexpr KernelTable kTable = make_table("scalar");
    return kTable;
}

}  // namespace ktqueue
