#include "deferral.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace ktqueue {

namespace {

void add(const float* x, size_t count, float* sum) {
    for (size_t i = 0; i < count; ++i) sum[i] += x[i];
}

}  // namespace

// Fills ids_ and rest_ids_; whether a token defers an expert that another one waits for.
bool Deferral::split(size_t experts, const int64_t* ids, size_t tokens, size_t slots, size_t deferred) {
    const size_t pairs = tokens * slots, first = slots - std::min(deferred, slots);
    const auto is_waited_for = [&](size_t pair) { return pair % slots < first; };
    const auto known = [&](size_t pair) { return ids[pair] >= 0 && ids[pair] < static_cast<int64_t>(experts); };
    waited_for_.assign(experts, 0);
    for (size_t pair = 0; pair < pairs; ++pair)
        if (known(pair) && is_waited_for(pair)) waited_for_[static_cast<size_t>(ids[pair])] = 1;
    ids_.assign(2 * pairs, -1);
    rest_ids_.assign(pairs, -1);
    bool shared = false, left = false;
    for (size_t pair = 0; pair < pairs; ++pair) {
        if (is_waited_for(pair) || (ids[pair] != -1 && !known(pair))) {  // the layer refuses what it does not know
            ids_[pair] = ids[pair];
        } else if (known(pair) && waited_for_[static_cast<size_t>(ids[pair])]) {
            ids_[pairs + pair] = ids[pair];
            shared = true;
        } else {
            rest_ids_[pair] = ids[pair];
            left = left || ids[pair] != -1;
        }
    }
    tokens_ = left ? tokens : 0;
    return shared;
}

void Deferral::first(const ExpertLayer& layer, const float* x, const int64_t* ids, const float* weights, size_t tokens,
                     size_t slots, size_t deferred, bool adds, float* out) {
    const size_t hidden = layer.hidden(), values = tokens * hidden;
    const size_t kept = std::exchange(kept_tokens_, 0);
    layer_ = nullptr;
    if (adds && kept != tokens)
        throw std::invalid_argument("a task of " + std::to_string(tokens) + " tokens adds what was deferred of " +
                                    std::to_string(kept));
    begun_ = false;
    if (deferred == 0) {
        layer.forward(x, ids, weights, tokens, slots, out);
    } else {
        weights_.assign(weights, weights + tokens * slots);
        begun_ = split(layer.experts(), ids, tokens, slots, deferred);
        if (begun_) {
            weights_.insert(weights_.end(), weights, weights + tokens * slots);
            twice_.assign(x, x + values);
            twice_.insert(twice_.end(), x, x + values);
            out_.resize(2 * values);
            layer.forward(twice_.data(), ids_.data(), weights_.data(), 2 * tokens, slots, out_.data());
            std::copy_n(out_.data(), values, out);
        } else {
            layer.forward(x, ids_.data(), weights, tokens, slots, out);
        }
        if (tokens_ > 0) layer_ = &layer;
    }
    if (adds) add(kept_.data(), values, out);
    kept_tokens_ = deferred == 0 ? 0 : tokens;
    if (begun_)
        kept_.assign(out_.data() + values, out_.data() + 2 * values);
    else if (deferred > 0)
        kept_.assign(values, 0.0f);
    x_ = x;
    slots_ = slots;
}

void Deferral::rest() {
    if (!layer_) return;
    const ExpertLayer& layer = *std::exchange(layer_, nullptr);
    const size_t values = tokens_ * layer.hidden();
    try {
        float* out = kept_.data();
        if (begun_) {
            out_.resize(values);
            out = out_.data();
        }
        layer.forward(x_, rest_ids_.data(), weights_.data(), tokens_, slots_, out);
        if (begun_) add(out, values, kept_.data());
    } catch (...) {
        kept_.assign(values, std::numeric_limits<float>::quiet_NaN());
        throw;
    }
}

}  // namespace ktqueue
