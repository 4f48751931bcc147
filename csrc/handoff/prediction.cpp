#include "handoff/prediction.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace ktqueue {

namespace {

// Half of the second-level cache per thread. The other half holds rows, sums and other data.
size_t bytes_a_thread() {
    constexpr long kUnknown = 1 << 20;
    const long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return static_cast<size_t>(cache > 0 ? cache : kUnknown) / 2;
}

}  // namespace

void Prediction::fetch(const ExpertLayer& layer, const int64_t* ids, size_t pairs, const std::function<bool()>& stop) {
    static const size_t most_bytes = bytes_a_thread();
    layer_ = &layer;
    seen_.assign(layer.experts(), 0);
    for (size_t i = 0; i < pairs; ++i) {
        const int64_t id = __atomic_load_n(ids + i, __ATOMIC_RELAXED);
        if (id >= 0 && static_cast<uint64_t>(id) < layer.experts()) seen_[static_cast<size_t>(id)] = 1;
    }
    experts_.clear();
    for (size_t expert = 0; expert < layer.experts(); ++expert)
        if (seen_[expert]) experts_.push_back(expert);
    if (!experts_.empty() && !stop()) layer.prefetch(experts_, most_bytes, stop);
}

Prediction::Score Prediction::score(const ExpertLayer& layer, const std::vector<uint8_t>& used) {
    if (std::exchange(layer_, nullptr) != &layer) return {0, 0};
    const auto right = std::ranges::count_if(experts_, [&](size_t expert) { return used[expert] != 0; });
    return {experts_.size(), static_cast<uint64_t>(right)};
}

}  // namespace ktqueue
