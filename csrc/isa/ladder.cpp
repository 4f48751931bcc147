#include "isa/ladder.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "isa/cpu_features.h"

namespace ktqueue {

namespace {

struct Rung {
    const char* name;
    bool (*present)();
    const KernelTable& (*table)();
};

// Slowest first. A CPU uses the last rung that it has.
//
//   name     needs                                   Intel from                           AMD from
//   scalar   nothing                                 any CPU                              any CPU
//   avx2     AVX2, FMA, F16C                         Haswell (2013)                       Zen (2017)
//   avxvnni  and AVX-VNNI                            Alder Lake (2021), Sierra Forest     Zen 5 (2024)
//   avx512   AVX2 and AVX-512 F BW DQ VL VNNI BF16   Cooper Lake (2020), Sapphire Rapids  Zen 4 (2022)
//   amx      and AMX with int8 and bf16 tiles        Sapphire Rapids (2023)               none
//
// Ice Lake has AVX-512 without BF16 and uses avx2. On the amx rung, tiles for block formats also need AVX512-FP16.
constexpr Rung kLadder[] = {
    {"scalar", [] { return true; }, portable_kernels},
#if KTQUEUE_X86
    {"avx2", has_avx2, avx2_kernels},
    {"avxvnni", has_avxvnni, avxvnni_kernels},
    {"avx512", has_avx512, avx512_kernels},
    {"amx", has_amx, amx_kernels},
#endif
};

std::string rung_names() {
    std::string names;
    for (const Rung& rung : kLadder) names += (names.empty() ? "" : ", ") + std::string(rung.name);
    return names;
}

const Rung& find(std::string_view name, const char* what) {
    for (const Rung& rung : kLadder)
        if (name == rung.name) return rung;
    throw std::invalid_argument(std::string(what) + " must be one of " + rung_names() + ", got '" + std::string(name) +
                                "'");
}

const KernelTable& choose() {
    const char* limit = std::getenv("KTQUEUE_ISA");
    const Rung* best = std::end(kLadder) - 1;
    if (limit && *limit) best = &find(limit, "KTQUEUE_ISA");
    while (!best->present()) --best;
    return best->table();
}

}  // namespace

const KernelTable& best_kernels() {
    static const KernelTable& table = choose();
    return table;
}

std::vector<const char*> present_kernels() {
    std::vector<const char*> names;
    for (const Rung& rung : kLadder)
        if (rung.present()) names.push_back(rung.name);
    return names;
}

const KernelTable& kernels_named(std::string_view isa) {
    if (isa.empty()) return best_kernels();
    const Rung& rung = find(isa, "isa");
    if (!rung.present()) throw std::invalid_argument("this CPU has no " + std::string(isa));
    return rung.table();
}

}  // namespace ktqueue
