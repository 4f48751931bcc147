// Passes tokens from a GPU to the expert layers of the CPU, and the results back, through memory that both can access.
// Knows no CUDA and no Python: the caller that enqueues work on the GPU (or plays the GPU) follows the protocol below.
//
// A *task* is one layer run on up to max_tokens tokens. There is memory for one task at a time: the input, the output,
// and two words on cache lines of their own. A task is named by a number that is never 0:
//   word = tokens << 12 | some_rows << 11 | predicts << 10 | (layer + 1)
// The input of a task of t tokens with k experts each:
//   [t, k] int64 expert ids (-1: none), [t, k] float32 weights, padding to 64 bytes, [t, hidden] float32 activations,
//   padding to 64 bytes, [t, k] int64 ids that the next layer will probably get
//
// The protocol. G is the GPU's stream, whose operations run one after the other. C is the thread that serves.
//   G1  write the input            by one operation or by several
//   G2  done := 0
//   G3  request := word            with a system-wide fence before it (the default of cuStreamWriteValue32)
//   C1  spin until request != 0    acquire
//   C2  request := 0
//   C3  read the input, run the layer, write the output
//   C4  done := word               release
//   G4  wait until done == word
//   G5  read the output
// Why nothing is read before it is written:
// - C3 reads what G1 wrote: G3 comes after G1 for the whole system because of its fence, and C1 reads the value of G3
//   with acquire, so C3 comes after both. Writes of a device over PCIe to system memory are coherent with CPU caches.
// - G5 reads what C3 wrote: C4 is a release, so a reader of its value also sees C3, and G5 is enqueued behind G4. A
//   kernel that reads the output in place must bypass its caches, which may hold lines of an earlier task.
// - G4 does not accept an old value: G2 removed it. C4 of an earlier task comes before G4 of that task, so before G2.
// - C2 removes no newer request: G3 of the next task comes after G4 of this one, which saw C4, and C2 comes before C4
//   (release). No request is served twice: C1 reads the next one only after C2.
// - All values are constants, so a captured graph can be replayed any number of times: each replay finds request == 0
//   and runs G2 and G3 again. All tasks belong to one stream order: G1 of a task comes after G5 of the one before.
//
// For a task that *predicts*, G also writes between G3 and G4 which experts the next layer will probably use. After C4
// the service fetches their weights into the caches until the next request arrives (handoff/prediction.h). C may read
// these ids while G still writes them. Then it fetches the wrong experts, or none, and results are the same.
//
// In a task of *some rows*, tokens without an expert keep their rows of the output, since G does not read them. For
// others C writes zeros.
//
// When a layer throws, the rows of the task become NaN, the message is kept for the next take_error(), and C4 happens
// as usual, so the GPU never waits for a failed task. When a task, or the fetch after it, does not end in time, a
// second thread declares the service broken: it answers this request and all later ones without running anything. So
// the GPU continues and the process can end. The error then stays.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "experts/expert_layer.h"

namespace ktqueue {

struct HandoffShape {
    size_t hidden, experts_per_token, max_tokens;

    size_t x_offset(size_t tokens) const { return round_up(12 * tokens * experts_per_token, 64); }
    size_t predicted_offset(size_t tokens) const { return x_offset(tokens) + round_up(4 * tokens * hidden, 64); }
    size_t input_bytes(size_t tokens) const { return predicted_offset(tokens) + 8 * tokens * experts_per_token; }
};

// Memory of the caller, each 64-byte aligned. The words are 128 bytes apart or more.
struct HandoffMemory {
    uint8_t* input;  // input_bytes(max_tokens)
    float* out;      // [max_tokens, hidden]
    void* request;   // uint32
    void* done;      // uint32
};

struct HandoffTimes {
    // After this time without a request the thread naps between two reads of the word: for a twentieth of the time that
    // it has been idle, at most 5 ms. (On a cloud machine that took 0.8 % of a CPU; spinning takes all of one.)
    double idle_seconds = 0.02;
    double stuck_seconds = 60.0;  // a task that takes longer breaks the service
};

struct HandoffStatistics {
    uint64_t tasks = 0, failed = 0;
    double busy_seconds = 0;
    uint64_t experts_used = 0;                   // number of different experts of each task, summed
    uint64_t bytes = 0;                          // of their weights
    uint64_t predicted = 0, predicted_used = 0;  // experts that were predicted, and those of them that were used
};

class Handoff {
  public:
    static constexpr unsigned kLayerBits = 10, kTokensAt = kLayerBits + 2;
    static constexpr size_t kMaxLayers = (1u << kLayerBits) - 1;
    static constexpr uint32_t kPredicts = 1u << kLayerBits, kSomeRows = kPredicts << 1;

    // `serve`: a thread answers the request word; otherwise only run() and host functions work. Sets both words to 0.
    // Throws std::invalid_argument.
    Handoff(const HandoffShape& shape, const HandoffMemory& memory, bool serve, const HandoffTimes& times);
    ~Handoff();  // close(1)
    Handoff(const Handoff&) = delete;
    Handoff& operator=(const Handoff&) = delete;

    // Returns the number of the layer, which must outlive this object (see close()). Throws std::invalid_argument.
    size_t add_layer(const ExpertLayer& layer);

    // Runs a task in the calling thread, without the words. Errors are kept as for any task.
    void run(uint32_t word);

    // run_host_function(host_task(word)) does run(word), in the form that cudaLaunchHostFunc takes. The argument is
    // valid as long as this object.
    void* host_task(uint32_t word);
    static void run_host_function(void* task);

    // The first error since the last call.
    std::optional<std::string> take_error();

    HandoffStatistics statistics() const;
    // How often the tasks used each expert of each layer.
    std::vector<std::vector<uint64_t>> uses() const;

    // Ends the threads; requests that are not served yet are answered without being run. Returns false if a task did
    // not end in time: then its thread is left behind, and memory and layers must stay for as long as the process
    // lives. Only the first call waits.
    bool close(double seconds);

  private:
    struct State;
    std::shared_ptr<State> state_;
};

}  // namespace ktqueue
