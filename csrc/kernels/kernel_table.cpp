#include "kernels/kernel_table.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "isa/cpu_features.h"

namespace ktqueue {

namespace {

struct Choice {
    const char* name;
    bool (*present)();
    const KernelTable& (*table)();
};

// Slowest first.
constexpr Choice kChoices[] = {
    {"scalar", [] { return true; }, portable_kernels},
#if KTQUEUE_X86
    {"avx2", has_avx2, avx2_kernels},
    {"avxvnni", has_avxvnni, avxvnni_kernels},
    {"avx512", has_avx512, avx512_kernels},
    {"amx", has_amx, amx_kernels},
#endif
};

std::string known_names() {
    std::string names;
    for (const Choice& choice : kChoices) names += (names.empty() ? "" : ", ") + std::string(choice.name);
    return names;
}

const Choice& find(std::string_view name, const char* what) {
    for (const Choice& choice : kChoices)
        if (name == choice.name) return choice;
    throw std::invalid_argument(std::string(what) + " must be one of " + known_names() + ", got '" + std::string(name) +
                                "'");
}

const KernelTable& choose() {
    const char* cap = std::getenv("KTQUEUE_ISA");
    const Choice* last = std::end(kChoices) - 1;
    if (cap && *cap) last = &find(cap, "KTQUEUE_ISA");
    while (!last->present()) --last;
    return last->table();
}

}  // namespace

const KernelTable& best_kernels() {
    static const KernelTable& table = choose();
    return table;
}

std::vector<const char*> present_kernels() {
    std::vector<const char*> names;
    for (const Choice& choice : kChoices)
        if (choice.present()) names.push_back(choice.name);
    return names;
}

const KernelTable& kernels_named(std::string_view isa) {
    if (isa.empty()) return best_kernels();
    const Choice& choice = find(isa, "isa");
    if (!choice.present()) throw std::invalid_argument("this CPU has no " + std::string(isa));
    return choice.table();
}

}  // namespace ktqueue
