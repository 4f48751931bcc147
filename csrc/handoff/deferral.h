// The experts of a task in two parts: those that its tokens wait for, and the rest, which the next task adds to its own.
// Knows neither slots nor words of a hand-off.
//
// A token *defers* the last `deferred` of its slots; slots stand in order of weight. An expert that any token of the
// task waits for is computed at once for all of its tokens, so that no expert is read twice, and what it makes of
// tokens that defer it is kept; experts for which nobody waits come in rest(). Which of them a token meets in which part
// is all that the other tokens decide: what it defers is the same, and so is its sum, to the order of three terms or more.
#pragma once

#include <cstdint>
#include <vector>

#include "experts/expert_layer.h"

namespace ktqueue {

class Deferral {
  public:
    // One task, as ExpertLayer::forward takes it: out = what the slots make that are not deferred, plus, if `adds`, what
    // the task before deferred. rest() reads x too; ids and weights are copied. Throws std::invalid_argument for ids
    // that are none, and if the task before deferred nothing, failed or had another number of tokens.
    void first(const ExpertLayer& layer, const float* x, const int64_t* ids, const float* weights, size_t tokens,
               size_t slots, size_t deferred, bool adds, float* out);

    // The rest of the last task, of which first() has left some or none. Throws what a layer throws; then the next task
    // adds NaN.
    void rest();

    // Forget what the last task has deferred: the next one has nothing to add.
    void drop();

  private:
    void split(size_t experts, const int64_t* ids, size_t tokens, size_t slots, size_t first);

    const ExpertLayer* layer_ = nullptr;  // of the rest; nullptr: there is none
    const float* x_ = nullptr;
    size_t rest_tokens_ = 0, slots_ = 0;
    std::vector<int64_t> now_, rest_;  // [tokens, slots]
    std::vector<float> weights_;       // [tokens, slots]
    std::vector<float> kept_;          // [tokens, hidden]: what was deferred
    size_t kept_tokens_ = 0;
    std::vector<uint8_t> waited_for_;  // [experts]
};

}  // namespace ktqueue
