// The instruction sets that this CPU and its operating system offer. Knows nothing about their use.
// Each answer is computed once and kept. On machines other than x86-64 every answer is false.
#pragma once

namespace ktqueue {

// AVX2 with FMA and F16C, and the system saves the 256-bit registers. Intel from Haswell (2013), AMD from Zen (2017).
bool has_avx2();

// has_avx2 and AVX-VNNI: vpdpbusd on 256-bit registers, without AVX-512. Intel from Alder Lake (2021), AMD from Zen 5.
bool has_avxvnni();

// has_avx2 and AVX-512 F, BW, VL, DQ, VNNI and BF16, and the system saves the 512-bit registers and the masks. Intel
// from Cooper Lake (2020), without Ice Lake, which lacks BF16; AMD from Zen 4 (2022).
bool has_avx512();

// has_avx512 and arithmetic on IEEE halves (AVX512-FP16). Intel from Sapphire Rapids (2023).
bool has_avx512_halves();

// has_avx512 and AMX with int8 and bf16 tiles, and Linux lets this process use the tiles. The first call asks for that
// permission (arch_prctl) for all threads of the process. Intel from Sapphire Rapids (2023).
bool has_amx();

}  // namespace ktqueue
