// Tokens from a GPU to the expert layers of the CPU and back, through memory that both see. Knows no CUDA and no Python:
// whoever enqueues work on the GPU (or plays the GPU) follows the protocol below.
//
// A *task* is one layer run on up to max_tokens tokens. A *slot* is the memory of one task at a time: the input, the
// output, and two words that lie on cache lines of their own. A task is named by a number that is never 0:
//   word = tokens << 13 | predicts << 12 | adds << 11 | defers << 10 | (layer + 1)
// The input of a task of t tokens with k experts each lies at the beginning of the slot's input memory:
//   [t, k] int64 expert ids (-1: none), [t, k] float32 weights, padding to 64 bytes, [t, hidden] float32 activations,
//   padding to 64 bytes, [t, k] int64 ids that the next layer will probably get
//
// Protocol of a slot, and why nobody reads what is not yet written. G is the GPU's stream, whose operations run one
// after the other; C is the thread that serves.
//   G1  write the input            by one operation or by several
//   G2  done := 0
//   G3  request := word            with a system-wide fence before it (the default of cuStreamWriteValue32)
//   C1  spin until request != 0    acquire
//   C2  request := 0
//   C3  read the input, run the layer, write the output
//   C4  done := word               release
//   G4  wait until done == word
//   G5  read the output
// - C3 reads what G1 wrote: G3 comes after G1 for the whole system by its fence, and C1 reads the value of G3 with
//   acquire, so C3 comes after both. Writes of a device over PCIe to system memory are coherent with the CPU's caches.
// - G5 reads what C3 wrote: C4 is a release, so who sees it sees C3; G5 is enqueued behind G4. A kernel that reads the
//   output where it lies does so past its caches, which may hold lines of an earlier task.
// - G4 is not content with an old value: G2 removed it. C4 of an earlier task comes before G4 of that task, so before G2.
// - C2 removes no younger request: G3 of the next task comes after G4 of this one, which saw C4, and C2 comes before C4
//   (release). And no request is served twice: C1 reads the next one only after C2.
// - All values are constants, so a captured graph can be replayed any number of times: each replay finds request == 0
//   and runs G2 and G3 anew. A slot belongs to one stream order at a time: G1 of a task comes after G5 of the one before.
//
// A task that *defers* leaves the last experts of each token for later (handoff/deferral.h), one that *adds* adds to its output
// what the task before it has left. Behind C4 of a task that defers comes
//   C5  read the activations in the slot, run what was left, keep the result in memory of the service's own
// - C serves one task after the other, so C3 of the next task, which adds the result, comes after C5.
// - C5 still reads the activations of its slot when G goes on. So the next task has another slot, and G1 of the one
//   after that comes after G4 of the next, which saw a C4 that comes after C5. Two slots in turn are enough.
// - Ids and weights are copied before C4. So a step that is given up between two tasks does no harm: its last C5 may read
//   activations that are being overwritten, but nothing else, and nobody adds what it makes of them.
//
// A task that *predicts* has G write, between G3 and G4, which experts the layer after this one will probably use. Behind
// C4 (and C5) the service fetches their weights into the caches until the next request comes (handoff/prediction.h). C may read
// them while G still writes: then it fetches the wrong ones, or none, and results are the same.
//
// When a layer throws, the rows of the task become NaN, the message is kept for the next take_error(), and C4 happens
// as ever: the GPU never waits for a task that failed. When a task, or what comes behind its end, does not end in time, a
// second thread declares the service broken: it answers this request and all later ones without running anything, so
// that the GPU goes on and the process can end; the error then stays.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "experts/expert_layer.h"

namespace ktqueue {

struct HandoffShape {
    size_t hidden, experts_per_token, max_tokens;
    size_t deferred_experts = 0;  // of a token, in a task that defers

    size_t x_offset(size_t tokens) const { return round_up(12 * tokens * experts_per_token, 64); }
    size_t predicted_offset(size_t tokens) const { return x_offset(tokens) + round_up(4 * tokens * hidden, 64); }
    size_t input_bytes(size_t tokens) const { return predicted_offset(tokens) + 8 * tokens * experts_per_token; }
};

// Memory of the caller, each 64-byte aligned; the words lie 128 bytes apart or more.
struct HandoffSlot {
    uint8_t* input;  // input_bytes(max_tokens)
    float* out;      // [max_tokens, hidden]
    void* request;   // uint32
    void* done;      // uint32
};

struct HandoffTimes {
    // Without a request until the thread naps, between two looks, for a twentieth of the time that it has been idle, but
    // at most 5 ms. (On a cloud machine that took 0.8 % of a CPU; spinning takes all of one.)
    double idle_seconds = 0.02;
    double stuck_seconds = 60.0;  // of one task until the service is broken
};

struct HandoffStatistics {
    uint64_t tasks = 0, failed = 0;
    double busy_seconds = 0;
    uint64_t experts_used = 0;                   // different ones of a task, added up
    uint64_t bytes = 0;                          // of their weights
    uint64_t predicted = 0, predicted_used = 0;  // experts that were predicted, and of those what the layer then used
};

class Handoff {
  public:
    static constexpr unsigned kLayerBits = 10, kTokensAt = kLayerBits + 3;
    static constexpr size_t kMaxLayers = (1u << kLayerBits) - 1;
    static constexpr uint32_t kDefers = 1u << kLayerBits, kAdds = 2u << kLayerBits, kPredicts = 4u << kLayerBits;

    // `serve`: whether a thread answers the request words; else only run() and host functions work. Sets all words to 0.
    // Throws std::invalid_argument.
    Handoff(const HandoffShape& shape, std::vector<HandoffSlot> slots, bool serve, const HandoffTimes& times);
    ~Handoff();  // close(1)
    Handoff(const Handoff&) = delete;
    Handoff& operator=(const Handoff&) = delete;

    // The number of the layer, which must outlive this object (see close()). Throws std::invalid_argument.
    size_t add_layer(const ExpertLayer& layer);

    // Runs a task in the calling thread, what it defers included, words aside. Errors are kept as for any task.
    void run(size_t slot, uint32_t word);

    // Two calls that are run(slot, word) one after the other, as cudaLaunchHostFunc wants them:
    // run_host_function(host_task(slot, word)), behind which the output is there, and for a task that defers
    // run_rest_function(rest_task()). What they are called with lives as long as this object. Throws
    // std::invalid_argument.
    void* host_task(size_t slot, uint32_t word);
    static void run_host_function(void* task);
    void* rest_task() { return state_.get(); }
    static void run_rest_function(void* task);

    // What went wrong since the last call, the first message of it.
    std::optional<std::string> take_error();

    HandoffStatistics statistics() const;

    // Ends the threads; requests not yet served are answered without being run. False if a task did not end in time:
    // then its thread is left alone, and memory and layers must stay for as long as the process lives. Waits only once.
    bool close(double seconds);

  private:
    struct State;
    std::shared_ptr<State> state_;
};

}  // namespace ktqueue
