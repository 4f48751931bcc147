// What the machine probe needs of one instruction set, as a table of function pointers: a loop that reads memory, and
// loops of multiply-adds in registers. Each table has its own translation unit and is used only if the CPU has the
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktqueue {

// The types of a multiply-add. INT8: unsigned by signed bytes, sums in int32. BF16: sums in float32. FP32: all float32.
enum class Arithmetic { INT8, BF16, FP32 };
inline constexpr size_t kArithmeticCount = 3;

// A loop that keeps the multiply-add units busy: independent accumulators, operands in registers.
struct PeakLoop {
    const char* instruction = nullptr;  // its name, for reports; nullptr: this instruction set has no such loop
    double operations = 0;              // of one round; a multiply-add counts as two
    void (*run)(size_t rounds) = nullptr;
};

// Reads `bytes` (a multiple of kReadStep) from `data` (aligned to 64) once. Returns a digest of them, so that no load
// can be optimised away. `prefetch`: how many bytes ahead software prefetches; 0 leaves it to the hardware.
using ReadLoop = uint64_t (*)(const char* data, size_t bytes, size_t prefetch);
inline constexpr size_t kReadStep = 512;

struct ProbeTable {
    const char* isa;
    bool (*available)();  // whether this CPU has it
    ReadLoop read;        // nullptr: use the one of the next smaller instruction set
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
