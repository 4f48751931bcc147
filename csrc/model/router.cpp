#include "model/router.h"

#include <cmath>
#include <limits>

namespace ktqueue {

void route(const float* logits, size_t experts, size_t chosen, bool renormalise, int64_t* ids, float* weights) {
    bool sound = true;
    size_t found = 0;
    for (size_t expert = 0; expert < experts; ++expert) {
        const float logit = logits[expert];
        sound = sound && logit < std::numeric_limits<float>::infinity();  // false for NaN
        if (found == chosen && !(logit > weights[chosen - 1])) continue;
        size_t place = found < chosen ? found++ : chosen - 1;
        for (; place > 0 && logit > weights[place - 1]; --place) {
            ids[place] = ids[place - 1];
            weights[place] = weights[place - 1];
        }
        ids[place] = static_cast<int64_t>(expert);
        weights[place] = logit;
    }
    const float largest = weights[0];
    if (!sound || largest == -std::numeric_limits<float>::infinity()) {
        for (size_t i = 0; i < chosen; ++i) {
            ids[i] = static_cast<int64_t>(i);
            weights[i] = std::numeric_limits<float>::quiet_NaN();
        }
        return;
    }
    float total = 0;
    if (!renormalise)
        for (size_t expert = 0; expert < experts; ++expert) total += std::exp(logits[expert] - largest);
    for (size_t i = 0; i < chosen; ++i) {
        weights[i] = std::exp(weights[i] - largest);
        if (renormalise) total += weights[i];
    }
    for (size_t i = 0; i < chosen; ++i) weights[i] /= total;
}

}  // namespace ktqueue
