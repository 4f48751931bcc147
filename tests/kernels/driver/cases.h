// What kernel_driver runs. Each case throws where the kernels break a promise.
#pragma once

#include "kernels/kernel_table.h"
#include "random.h"

namespace ktqueue {

// Attention of a random step; refused if its indices were damaged badly enough.
void run_attention(Random& random, const KernelTable& kernels);

// Packed matrices times rows, alone, several at once and from several threads.
void run_linear(Random& random, const KernelTable& kernels);

// An expert layer, from one thread and several.
void run_experts(Random& random, const KernelTable& kernels);

// What an expert layer fetches ahead, and what its threads then read.
void run_prefetch(Random& random, const KernelTable& kernels);

// The tables of this CPU, and bf16 tiles in plain C++ from 5 tokens on where it has AVX-512 but no AMX.
const std::vector<const KernelTable*>& all_kernels();

}  // namespace ktqueue
