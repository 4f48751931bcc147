// Measures the limits of this machine on the threads of the shared pool: how fast it reads memory and how fast it
// multiplies. Kernels are compared with these limits; the probe uses no kernel.
#pragma once

#include <string>
#include <vector>

#include "probe/table.h"

namespace ktqueue {

// The instruction sets of this build that this CPU has, smallest first.
std::vector<const ProbeTable*> available_probes();

// Reads memory of its own, so that the result does not depend on the pages of weights.
class ReadProbe {
  public:
    // `size`: bytes, rounded up to a multiple of 2 MiB per thread of the shared pool. In huge pages if the system
    // provides them, first touched by the pool's threads. Throws std::bad_alloc, or std::invalid_argument if `size` is
    // 0.
    explicit ReadProbe(size_t size);
    ~ReadProbe();
    ReadProbe(const ReadProbe&) = delete;
    ReadProbe& operator=(const ReadProbe&) = delete;

    // Bytes per second of the fastest of `repeats` measurements. In each, `threads` tasks (at most the pool's threads;
    // 0: all) read an equal contiguous share of the first `size` bytes (0: all), `rounds` times, with the widest loads
    // of this CPU. `prefetch`: as in ReadLoop. Throws std::invalid_argument if a number is out of range.
    double measure(size_t size, size_t threads, size_t rounds, size_t repeats, size_t prefetch) const;

    size_t bytes() const { return bytes_; }

  private:
    size_t bytes_ = 0;
    char* data_ = nullptr;  // aligned to 2 MiB, inside mapping_
    void* mapping_ = nullptr;
    size_t mapping_bytes_ = 0;
};

// Operations per second (a multiply-add counts as two) of `arithmetic` in registers on `threads` threads (0: the
// pool's). The fastest of `repeats` measurements of about `seconds` each. Throws std::invalid_argument that names an
// instruction set that is unknown, that this CPU lacks, or that has no such arithmetic.
double measure_peak(const std::string& isa, Arithmetic arithmetic, size_t threads, double seconds, size_t repeats);

// Parses "int8", "bf16" or "fp32". Throws std::invalid_argument for any other name.
Arithmetic parse_arithmetic(const std::string& name);
const char* arithmetic_name(Arithmetic arithmetic);

}  // namespace ktqueue
