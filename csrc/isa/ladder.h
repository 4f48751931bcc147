// The ladder of instruction sets: which tables of kernels there are, and which one this CPU uses. The CPU generations
// of each rung are in ladder.cpp.
#pragma once

#include <string_view>
#include <vector>

#include "kernels/kernel_table.h"

namespace ktqueue {

// The best table for this CPU, limited by the environment variable KTQUEUE_ISA (a table's name) if it is set. Decided
// at the first call. Throws std::invalid_argument if the variable's value is unknown.
const KernelTable& best_kernels();

// The table with that name; empty: best_kernels(). Throws std::invalid_argument if it is unknown or this CPU lacks it.
const KernelTable& kernels_named(std::string_view isa);

// Names of the tables that this CPU can run, slowest first, regardless of KTQUEUE_ISA.
std::vector<const char*> present_kernels();

// One rung each; the file of the same name defines it.
const KernelTable& portable_kernels();
#if KTQUEUE_X86
const KernelTable& avx2_kernels();
const KernelTable& avxvnni_kernels();
const KernelTable& avx512_kernels();
const KernelTable& amx_kernels();
#endif

}  // namespace ktqueue
