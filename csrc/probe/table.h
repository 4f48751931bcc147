// What the machine probe needs of one instruction set, as a table of function pointers: a loop that reads memory and
// loops of multiply-adds in registers. A translation unit each; one that the CPU lacks is never called.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktqueue {

// What is multiplied. INT8: unsigned by signed bytes, sums in int32. BF16: sums in float32. FP32: throughout.
enum class Arithmetic { INT8, BF16, FP32 };
inline constexpr size_t kArithmeticCount = 3;

// A loop that keeps the multiply-add units busy: independent accumulators, operands in registers.
struct PeakLoop {
    const char* instruction = nullptr;  // for people; nullptr: this instruction set has no such loop
    double operations = 0;              // of one round; a multiply-add is two
    void (*run)(size_t rounds) = nullptr;
};

// Reads `bytes` (a multiple of kReadStep) from `data` (aligned to 64) once and returns a digest of them, so that no
// load can be left out. `prefetch`: bytes ahead that are asked for by software; 0 leaves it to the hardware.
using ReadLoop = uint64_t (*)(const char* data, size_t bytes, size_t prefetch);
inline constexpr size_t kReadStep = 512;

struct ProbeTable {
    const char* isa;
    bool (*available)();  // does this CPU have it
    ReadLoop read;        // nullptr: as the one below it
    PeakLoop peaks[kArithmeticCount];
};

const ProbeTable& scalar_probes();
#if defined(__x86_64__)
const ProbeTable& avx2_probes();
const ProbeTable& avxvnni_probes();
const ProbeTable& avx512_probes();
const ProbeTable& amx_probes();
#endif

}  // namespace ktqueue
