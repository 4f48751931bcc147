// Python's ExpertLayer and Linear: packed weights for the kernels.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "experts/expert_layer.h"
#include "model/linear.h"

namespace ktqueue {

class BoundExpertLayer {
  public:
    // Each matrix: (quant name, rows, columns, one uint8 array per expert, bias [experts, rows] float32 or None).
    BoundExpertLayer(const nb::tuple& gate, const nb::tuple& up, const nb::tuple& down, const std::string& activation,
                     float alpha, float limit, bool weighted_input, const std::string& activations,
                     const std::string& isa);

    void forward(const ReadOnly& x, const ReadOnly& ids, const ReadOnly& weights, const Writable& out) const;

    // (address, bytes) of an expert's packed memory, in order.
    std::vector<std::pair<uintptr_t, size_t>> ranges(size_t expert) const;

    // For tests: the addresses of the cache lines that each thread would prefetch, in order. `stop_after`: how many
    // calls of stop(), over all threads, return false.
    std::vector<std::vector<uintptr_t>> prefetch_lines(const std::vector<size_t>& experts, size_t most_bytes,
                                                       uint64_t stop_after) const;

    const ExpertLayer& layer() const { return *layer_; }

  private:
    std::optional<ExpertLayer> layer_;
};

class BoundLinear {
  public:
    BoundLinear(const std::string& quant, size_t rows, size_t columns, const ReadOnly& packed,
                const std::optional<ReadOnly>& bias, const std::string& activations, const std::string& isa);

    void forward(const ReadOnly& x, const Writable& out) const;

    const Linear& linear() const { return *linear_; }

  private:
    std::optional<Linear> linear_;
};

}  // namespace ktqueue
