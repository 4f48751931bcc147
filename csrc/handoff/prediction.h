// Fetches the experts that a layer will probably use, while the layer before it is being computed and the CPU has no
// other work. A wrong prediction costs only that time. Knows nothing about the hand-off's words.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "experts/expert_layer.h"

namespace ktqueue {

class Prediction {
  public:
    // Fetches what `layer` would read first for ids [pairs], until `stop()` returns true or the caches are full. The
    // ids may be written meanwhile: ids that are no expert are ignored.
    void fetch(const ExpertLayer& layer, const int64_t* ids, size_t pairs, const std::function<bool()>& stop);

    struct Score {
        uint64_t predicted, used;  // experts of the last prediction, and how many of them were used
    };

    // Compares the last prediction, if it was for `layer`, with used [experts], the experts that the layer did use.
    // Forgets the prediction.
    Score score(const ExpertLayer& layer, const std::vector<uint8_t>& used);

  private:
    const ExpertLayer* layer_ = nullptr;
    std::vector<uint8_t> seen_;  // [experts]
    std::vector<size_t> experts_;
};

}  // namespace ktqueue
