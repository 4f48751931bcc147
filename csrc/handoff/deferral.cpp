#include "handoff/deferral.h"

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace ktqueue {

// Divides ids between now_ and rest_; what the layer does not know goes to now_, to be refused.
void Deferral::split(size_t experts, const int64_t* ids, size_t tokens, size_t slots, size_t first) {
    const auto known = [&](int64_t id) { return id >= 0 && id < static_cast<int64_t>(experts); };
    waited_for_.assign(experts, 0);
    for (size_t token = 0; token < tokens; ++token)
        for (size_t slot = 0; slot < first; ++slot)
            if (const int64_t id = ids[token * slots + slot]; known(id)) waited_for_[static_cast<size_t>(id)] = 1;
    now_.assign(ids, ids + tokens * slots);
    rest_.assign(tokens * slots, -1);
    rest_tokens_ = 0;
    for (size_t token = 0; token < tokens; ++token) {
        for (size_t pair = token * slots + first; pair < (token + 1) * slots; ++pair) {
            if (!known(ids[pair]) || waited_for_[static_cast<size_t>(ids[pair])]) continue;
            rest_[pair] = std::exchange(now_[pair], -1);
            rest_tokens_ = tokens;
        }
    }
}

void Deferral::first(const ExpertLayer& layer, const float* x, const int64_t* ids, const float* weights, size_t tokens,
                     size_t slots, size_t deferred, bool adds, float* out) {
    const size_t kept = kept_tokens_;
    drop();
    if (adds && kept != tokens)
        throw std::invalid_argument("a task of " + std::to_string(tokens) + " tokens adds what was deferred of " +
                                    std::to_string(kept));
    if (deferred > 0) {
        kept_.resize(tokens * layer.hidden());
        weights_.assign(weights, weights + tokens * slots);
        split(layer.experts(), ids, tokens, slots, slots - deferred);
        ids = now_.data();
    }
    const SplitSum sums = {slots - deferred, deferred > 0 ? kept_.data() : nullptr, adds ? kept_.data() : nullptr};
    layer.forward(x, ids, weights, tokens, slots, out, &sums);
    if (deferred == 0) return;
    kept_tokens_ = tokens;
    if (rest_tokens_ == 0) return;
    layer_ = &layer;
    x_ = x;
    slots_ = slots;
}

void Deferral::rest() {
    if (!layer_) return;
    const ExpertLayer& layer = *std::exchange(layer_, nullptr);
    const SplitSum sums = {slots_, nullptr, kept_.data()};
    try {
        layer.forward(x_, rest_.data(), weights_.data(), rest_tokens_, slots_, kept_.data(), &sums);
    } catch (...) {
        kept_.assign(kept_.size(), std::numeric_limits<float>::quiet_NaN());
        throw;
    }
}

void Deferral::drop() {
    kept_tokens_ = 0;
    layer_ = nullptr;
}

}  // namespace ktqueue
