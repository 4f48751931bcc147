#include "kernel_table.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu_features.h"

namespace ktqueue {

namespace {

const KernelTable& choose() {
    const char* cap = std::getenv("KTQUEUE_ISA");
    const std::string name = cap ? cap : "";
    if (!name.empty() && name != "scalar" && name != "avx2")
        throw std::invalid_argument("KTQUEUE_ISA must be scalar or avx2, got '" + name + "'");
#if KTQUEUE_HAS_AVX2
    if (name != "scalar" && has_avx2()) return avx2_kernels();
#endif
    return portable_kernels();
}

}  // namespace

const KernelTable& best_kernels() {
    static const KernelTable& table = choose();
    return table;
}

const KernelTable& kernels_named(std::string_view isa) {
    if (isa.empty()) return best_kernels();
    if (isa == "scalar") return portable_kernels();
    if (isa != "avx2") throw std::invalid_argument("isa must be scalar or avx2, got '" + std::string(isa) + "'");
#if KTQUEUE_HAS_AVX2
    if (has_avx2()) return avx2_kernels();
#endif
    throw std::invalid_argument("this CPU has no avx2 with fma and f16c");
}

}  // namespace ktqueue
