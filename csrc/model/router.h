// Which experts a token goes to, from its router's logits. Knows no expert.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktqueue {

// The `chosen` largest of logits[experts], largest first, ties by the lower id, and their softmax weights: over all
// experts, or over the chosen ones if `renormalise`. 1 <= chosen <= experts. Logits that are no finite numbers (NaN, or
// an infinity above) give ids 0 .. chosen - 1 and NaN weights: they spoil this token and no other.
void route(const float* logits, size_t experts, size_t chosen, bool renormalise, int64_t* ids, float* weights);

}  // namespace ktqueue
