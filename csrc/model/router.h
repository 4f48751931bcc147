// Chooses a token's experts from its router logits. Knows no expert.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ktqueue {

// How a router scores experts: transformers' DeepseekV2TopkRouter and DeepseekV3TopkRouter in general, the highest
// softmax by default.
struct Routing {
    size_t chosen = 0;         // experts of a token
    bool renormalise = false;  // scale the weights of the chosen experts to a sum of one
    bool sigmoid = false;      // a score is the sigmoid of its logit; otherwise the softmax over all experts
    float scale = 1;           // of the final weights
    // Only experts of the best `groups_used` of `groups` groups are chosen. The score of a group is that of its best
    // expert, with sigmoids the sum of its best two.
    size_t groups = 1, groups_used = 1;
    std::vector<float> bias;  // [experts], added to the scores only to choose; or empty
    // Not 0: two experts are chosen one after the other. The weight of each is its softmax over those experts not chosen
    // before whose logits are within 2 * jitter of it, relative to the larger magnitude (transformers' sparsemixer).
    float jitter = 0;
    std::vector<float> scales;  // [experts], further factors of the final weights; or empty
};

// Throws std::invalid_argument if the router cannot choose among so many experts.
void check(const Routing& routing, size_t experts);

// Writes the ids of the chosen experts of logits[experts] and their weights, highest weight first, ties by the lower id.
// If a logit is NaN or +infinity, or all are -infinity, the ids are 0 .. chosen - 1 and the weights NaN, which spoils
// this token and no other. scratch: [experts].
void route(const float* logits, size_t experts, const Routing& routing, float* scratch, int64_t* ids, float* weights);

}  // namespace ktqueue
