// Chooses a token's experts from its router logits. Knows no expert.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktqueue {

// Writes the ids of the `chosen` largest of logits[experts], largest first, ties by the lower id, and their softmax
// weights: over all experts, or over the chosen ones if `renormalise`. 1 <= chosen <= experts. If a logit is NaN or
// +infinity, or all are -infinity, the ids are 0 .. chosen - 1 and the weights NaN, which spoils this token and no
// other.
void route(const float* logits, size_t experts, size_t chosen, bool renormalise, int64_t* ids, float* weights);

}  // namespace ktqueue
