// Which experts a layer will probably use, known while the layer before it is computed: their weights can be on their
// way from memory while nobody has work for the CPU. A wrong guess costs nothing but that time. Knows neither slots nor
// words of a hand-off.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "experts/expert_layer.h"

namespace ktqueue {

class Prediction {
  public:
    // Fetches what `layer` would read first for ids [pairs], until `stop()` or until the caches have enough. Somebody may
    // be writing ids: whatever they are meanwhile, those that are no expert are passed over.
    void fetch(const ExpertLayer& layer, const int64_t* ids, size_t pairs, const std::function<bool()>& stop);

    struct Score {
        uint64_t predicted, used;  // experts of the last prediction, and how many of them were then used
    };

    // Of the last prediction, if it was for `layer`, with used [experts]: what the layer was then given. Forgets it.
    Score score(const ExpertLayer& layer, const std::vector<uint8_t>& used);

  private:
    const ExpertLayer* layer_ = nullptr;
    std::vector<uint8_t> seen_;  // [experts]
    std::vector<size_t> experts_;
};

}  // namespace ktqueue
