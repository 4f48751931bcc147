// Asks the CPU directly, because __builtin_cpu_supports needs a symbol that some compilers' runtime libraries lack.
// Leaves, bits and XCR0: Intel's Software Developer's Manual, volume 2 (CPUID) and volume 1, chapters 13 and 18. The
// request for tile data: the kernel's Documentation/arch/x86/xstate.rst.
#include "isa/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ktqueue {

namespace {

struct Features {
    bool avx2 = false;
    bool avxvnni = false;
    bool avx512 = false;
    bool amx = false;
    bool halves = false;
};

#if defined(__x86_64__)

constexpr bool all(unsigned value, unsigned bits) {
    return (value & bits) == bits;
}
constexpr unsigned bit(unsigned number) {
    return 1u << number;
}

constexpr unsigned kXcr0Avx = bit(1) | bit(2);                      // xmm, upper ymm
constexpr unsigned kXcr0Avx512 = bit(5) | bit(6) | bit(7);          // masks, upper zmm, zmm 16 to 31
constexpr unsigned kXcr0Amx = bit(17) | bit(18);                    // tile configuration, tile data
constexpr long kArchReqXcompPerm = 0x1023, kXfeatureTileData = 18;  // arch_prctl

Features detect() {
    Features found;
    unsigned eax, ebx, ecx, edx;
    constexpr unsigned kBasis = bit(12) | bit(27) | bit(28) | bit(29);  // FMA, OSXSAVE, AVX, F16C
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !all(ecx, kBasis)) return found;
    unsigned xcr0, high;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    if (!all(xcr0, kXcr0Avx) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return found;
    unsigned eax1 = 0, ebx1, ecx1, edx1;  // subleaf 1; 0 if it does not exist
    if (eax >= 1) __get_cpuid_count(7, 1, &eax1, &ebx1, &ecx1, &edx1);
    found.avx2 = all(ebx, bit(5));
    found.avxvnni = found.avx2 && all(eax1, bit(4));
    constexpr unsigned kAvx512 = bit(16) | bit(17) | bit(30) | bit(31);                            // F, DQ, BW, VL
    found.avx512 = found.avx2 && all(xcr0, kXcr0Avx512) && all(ebx, kAvx512) && all(ecx, bit(11))  // VNNI
                   && all(eax1, bit(5));                                                           // BF16
    constexpr unsigned kAmx = bit(22) | bit(24) | bit(25);                                         // BF16, TILE, INT8
    found.amx = found.avx512 && all(xcr0, kXcr0Amx) && all(edx, kAmx);
    found.halves = found.avx512 && all(edx, bit(23));  // AVX512-FP16
    return found;
}

bool may_use_tiles() {
    return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

#else

Features detect() {
    return {};
}
bool may_use_tiles() {
    return false;
}

#endif

const Features& features() {
    static const Features found = detect();
    return found;
}

}  // namespace

bool has_avx2() {
    return features().avx2;
}

bool has_avxvnni() {
    return features().avxvnni;
}

bool has_avx512() {
    return features().avx512;
}

bool has_avx512_halves() {
    return features().halves;
}

bool has_amx() {
    static const bool allowed = features().amx && may_use_tiles();
    return allowed;
}

}  // namespace ktqueue
