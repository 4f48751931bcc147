// The limits of the machine that this runs on: how fast memory can be read and how fast can be multiplied, on the
// threads of the shared pool. Knows no kernel: it is what kernels are measured against.
#pragma once

#include <string>
#include <vector>

#include "probe/table.h"

namespace ktqueue {

// The instruction sets that this build and this CPU have, from the least to the most.
std::vector<const ProbeTable*> available_probes();

// Reads a range of memory of its own, so that what it measures does not depend on the weights' pages.
class ReadProbe {
  public:
    // `size`: bytes, rounded up to a multiple of 2 MiB a thread of the shared pool; in huge pages where the system gives
    // them, first touched by the pool's threads. Throws std::bad_alloc, std::invalid_argument if it is 0.
    explicit ReadProbe(size_t size);
    ~ReadProbe();
    ReadProbe(const ReadProbe&) = delete;
    ReadProbe& operator=(const ReadProbe&) = delete;

    // Bytes a second of the fastest of `repeats` measurements. In each, `threads` tasks (at most the pool's threads; 0:
    // all of them) read an equal share each of the first `size` bytes (0: all of them), contiguous, `rounds` times
    // over, with the widest loads that the CPU has. `prefetch`: as in ReadLoop. Throws std::invalid_argument if a
    // count is out of range.
    double measure(size_t size, size_t threads, size_t rounds, size_t repeats, size_t prefetch) const;

    size_t bytes() const { return bytes_; }

  private:
    size_t bytes_ = 0;
    char* data_ = nullptr;  // aligned to 2 MiB, inside mapping_
    void* mapping_ = nullptr;
    size_t mapping_bytes_ = 0;
};

// Operations a second (a multiply-add is two) of `arithmetic` in registers on `threads` threads (0: the pool's), the
// fastest of `repeats` measurements of about `seconds` each. Throws std::invalid_argument naming an instruction set
// that is unknown, that this CPU lacks, or that has no such arithmetic.
double measure_peak(const std::string& isa, Arithmetic arithmetic, size_t threads, double seconds, size_t repeats);

// "int8", "bf16" or "fp32". Throws std::invalid_argument if it is none of them.
Arithmetic parse_arithmetic(const std::string& name);
const char* arithmetic_name(Arithmetic arithmetic);

}  // namespace ktqueue
