#include "model/router.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace ktqueue {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kSumFloor = 1e-20f;  // transformers' DeepseekV3MoE adds it, because all sigmoids may be 0

float sigmoid(float x) {
    return 1.0f / (1.0f + std::exp(-x));
}

// The indices of the `wanted` largest of scores[count], largest first, ties by the lower index. `best`: [wanted].
void choose_best(const float* scores, size_t count, size_t wanted, int64_t* ids, float* best) {
    size_t found = 0;
    for (size_t i = 0; i < count; ++i) {
        const float score = scores[i];
        if (found == wanted && !(score > best[wanted - 1])) continue;
        size_t place = found < wanted ? found++ : wanted - 1;
        for (; place > 0 && score > best[place - 1]; --place) {
            ids[place] = ids[place - 1];
            best[place] = best[place - 1];
        }
        ids[place] = static_cast<int64_t>(i);
        best[place] = score;
    }
}

// Gives -infinity to the experts of all groups but the best ones.
void drop_groups(float* scores, size_t experts, const Routing& routing) {
    const size_t size = experts / routing.groups;
    std::vector<float> group_scores(routing.groups), best(routing.groups_used);
    std::vector<int64_t> used(routing.groups_used);
    for (size_t group = 0; group < routing.groups; ++group) {
        float first = -kInfinity, second = -kInfinity;
        for (size_t i = group * size; i < (group + 1) * size; ++i) {
            second = std::max(second, std::min(first, scores[i]));
            first = std::max(first, scores[i]);
        }
        group_scores[group] = routing.sigmoid ? first + second : first;
    }
    choose_best(group_scores.data(), routing.groups, routing.groups_used, used.data(), best.data());
    for (size_t group = 0; group < routing.groups; ++group)
        if (std::find(used.begin(), used.end(), static_cast<int64_t>(group)) == used.end())
            std::fill_n(scores + group * size, size, -kInfinity);
}

// The weights of the two chosen experts of a router with `jitter`. A comparison with NaN, of 0 / 0, keeps the expert.
void weigh_two(const float* logits, size_t experts, float jitter, const int64_t* ids, float* weights) {
    for (size_t slot = 0; slot < 2; ++slot) {
        const float best = logits[ids[slot]];
        float total = 0;
        for (size_t expert = 0; expert < experts; ++expert) {
            const float logit = logits[expert];
            const bool far = (best - logit) / std::max(std::fabs(logit), best) > 2 * jitter;
            if (!far && (slot == 0 || static_cast<int64_t>(expert) != ids[0])) total += std::exp(logit - best);
        }
        weights[slot] = 1 / total;
    }
}

}  // namespace

void check(const Routing& routing, size_t experts) {
    const auto refuse = [](const std::string& what) { throw std::invalid_argument(what + " does not fit the router"); };
    const auto [chosen, groups, used] = std::array{routing.chosen, routing.groups, routing.groups_used};
    if (chosen < 1 || chosen > experts) refuse("the number of experts a token");
    if (groups < 1 || experts % groups || used < 1 || used > groups) refuse("the number of groups");
    if (chosen > experts / groups * used) refuse("the number of groups used");
    if (!routing.bias.empty() && routing.bias.size() != experts) refuse("the bias");
    if (!routing.scales.empty() && routing.scales.size() != experts) refuse("the number of scales");
    const bool plain = routing.bias.empty() && routing.scales.empty();
    if (routing.jitter != 0 && (chosen != 2 || used < groups || !plain)) refuse("the jitter");
}

void route(const float* logits, size_t experts, const Routing& routing, float* scratch, int64_t* ids, float* weights) {
    const size_t chosen = routing.chosen;
    const float largest = *std::max_element(logits, logits + experts);
    const bool sound = std::all_of(logits, logits + experts, [](float logit) { return logit < kInfinity; });  // no NaN
    if (!sound || largest == -kInfinity) {
        for (size_t i = 0; i < chosen; ++i) {
            ids[i] = static_cast<int64_t>(i);
            weights[i] = std::numeric_limits<float>::quiet_NaN();
        }
        return;
    }
    const bool grouped = routing.groups_used < routing.groups;
    float all = 0;  // of the softmax over all experts
    if (!routing.sigmoid && (!routing.renormalise || !routing.bias.empty()))
        for (size_t expert = 0; expert < experts; ++expert) all += std::exp(logits[expert] - largest);
    if (!grouped && routing.bias.empty()) {
        choose_best(logits, experts, chosen, ids, weights);
    } else {
        for (size_t expert = 0; expert < experts; ++expert) {
            const float logit = logits[expert];
            scratch[expert] = routing.sigmoid ? sigmoid(logit) : logit;
            if (routing.bias.empty()) continue;
            if (!routing.sigmoid) scratch[expert] = std::exp(logit - largest) / all;
            scratch[expert] += routing.bias[expert];
        }
        if (grouped) drop_groups(scratch, experts, routing);
        choose_best(scratch, experts, chosen, ids, weights);
        std::sort(ids, ids + chosen,
                  [&](int64_t a, int64_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });
    }
    if (routing.jitter != 0) return weigh_two(logits, experts, routing.jitter, ids, weights);
    float total = routing.renormalise ? 0 : all;
    for (size_t i = 0; i < chosen; ++i) {
        const float logit = logits[ids[i]];
        weights[i] = routing.sigmoid ? sigmoid(logit) : std::exp(logit - largest);
        if (routing.renormalise) total += weights[i];
    }
    const bool divided = routing.renormalise || !routing.sigmoid;
    if (routing.sigmoid && routing.renormalise) total += kSumFloor;
    for (size_t i = 0; i < chosen; ++i) {
        if (divided) weights[i] /= total;
        weights[i] *= routing.scale;
        if (!routing.scales.empty()) weights[i] *= routing.scales[static_cast<size_t>(ids[i])];
    }
}

}  // namespace ktqueue
