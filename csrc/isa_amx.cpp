// The kernels for AMX: those of AVX-512, and tiles where an expert has many rows.
#include "kernel_table.h"

namespace ktqueue {

const KernelTable& amx_kernels() {
    static const KernelTable kTable = [] {
        KernelTable table = avx512_kernels();
        table.isa = "amx";
        return table;
    }();
    return kTable;
}

}  // namespace ktqueue
