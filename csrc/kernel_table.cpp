#include "kernel_table.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if KTQUEUE_HAS_AVX2
#include <cpuid.h>
#endif

namespace ktqueue {

namespace {

#if KTQUEUE_HAS_AVX2
// Asked of the CPU itself: __builtin_cpu_supports needs a symbol that not every compiler's runtime library has.
// Bits as in Intel's manual, volume 2, CPUID; XCR0 bits 1 and 2 say that the system saves the wide registers.
bool has_avx2() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
    constexpr unsigned kNeeded = bit_AVX | bit_FMA | bit_F16C | bit_OSXSAVE;
    if ((ecx & kNeeded) != kNeeded) return false;
    unsigned xcr0, high;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    if ((xcr0 & 6) != 6) return false;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_AVX2);
}
#endif

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
