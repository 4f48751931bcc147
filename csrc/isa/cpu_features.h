// Which instruction sets this CPU and its kernel offer. Knows nothing of what they are used for.
// Each answer is found once and kept. On a machine that is not x86-64 every answer is no.
#pragma once

namespace ktqueue {

// AVX2 with FMA and F16C, and the system saves the 256-bit registers.
bool has_avx2();

// has_avx2, and AVX-VNNI: vpdpbusd on 256-bit registers without AVX-512.
bool has_avxvnni();

// has_avx2, and AVX-512 F, BW, VL, DQ, VNNI and BF16, and the system saves the 512-bit registers and the masks.
bool has_avx512();

// has_avx512, and arithmetic of IEEE halves (AVX512-FP16).
bool has_avx512_halves();

// has_avx512, and AMX with int8 and bf16 tiles, and Linux lets this process use the tiles: the first call asks for
// that (arch_prctl), for all threads of the process.
bool has_amx();

}  // namespace ktqueue
