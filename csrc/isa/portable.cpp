// The kernels in plain C++, for any CPU.
#include "isa/lanes_scalar.h"
#include "isa/vector_portable.h"
// Needs the vectors above.
#include "isa/vector_wide8.h"
// The table is built of the lanes and vectors above.
#include "isa/table.h"

namespace ktqueue {

const KernelTable& portable_kernels() {
    static constexpr KernelTable kTable = make_table("scalar");
    return kTable;
}

}  // namespace ktqueue
