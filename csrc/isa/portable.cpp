// Kernels in plain C++, for any CPU.
#include "isa/lanes_portable.h"
#include "isa/vector_portable.h"
// Needs the vectors above.
#include "isa/vector_wide8.h"
// Builds the table from the lanes and vectors above.
#include "isa/ladder.h"
#include "isa/table.h"

namespace ktqueue {

const KernelTable& portable_kernels() {
    static constexpr KernelTable kTable = make_table("scalar");
    return kTable;
}

}  // namespace ktqueue
