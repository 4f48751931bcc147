// The cases of kernel_driver. Each throws if the kernels break a promise.
#pragma once

#include "kernels/kernel_table.h"
#include "random.h"

namespace ktqueue {

// Attention of a random step. It must be refused if its indices are damaged.
void run_attention(Random& random, const KernelTable& kernels);

// Packed matrices times rows, alone, several at once and from several threads.
void run_linear(Random& random, const KernelTable& kernels);

// An expert layer, from one thread and several.
void run_experts(Random& random, const KernelTable& kernels);

// The lines that an expert layer prefetches, and the lines that its threads then read.
void run_prefetch(Random& random, const KernelTable& kernels);

// The tables of this CPU. With AVX-512 but no AMX, also tiles in plain C++ from 5 tokens on.
const std::vector<const KernelTable*>& all_kernels();

}  // namespace ktqueue
