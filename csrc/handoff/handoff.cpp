#include "handoff/handoff.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "handoff/prediction.h"
#include "threads/pause.h"

namespace ktqueue {

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr uint32_t kPausesPerYield = 200;
constexpr Seconds kShortestNap(1e-4), kLongestNap(5e-3);
constexpr auto kAnswerPeriod = std::chrono::milliseconds(1);  // of the second thread, when the service is broken
constexpr uint32_t kLayerMask = (1u << Handoff::kLayerBits) - 1;

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free);

bool aligned(const void* address, size_t bytes) {
    return address && reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

}  // namespace

// Shared by the object and its detached threads: the last of them frees it.
struct Handoff::State {
    struct HostTask {
        State* state;
        uint32_t word;
    };

    const HandoffShape shape;
    const HandoffTimes times;
    uint8_t* const input;
    float* const out;
    Word* const request;
    Word* const done;
    Word serving{0};  // the request that is being served
    std::array<std::atomic<const ExpertLayer*>, kMaxLayers> layers{};
    std::atomic<bool> stop{false}, broken{false};
    std::atomic<Clock::rep> busy_since{0};  // when the serving thread started its work; 0: idle

    mutable std::mutex mutex;  // protects everything below
    std::condition_variable changed;
    size_t layer_count = 0, running_threads = 0;
    std::map<uint32_t, HostTask> host_tasks;  // their addresses do not change
    HandoffStatistics statistics;
    std::string error;  // the first one that has not been taken
    std::vector<uint8_t> used;
    std::vector<std::vector<uint64_t>> uses;  // by layer

    Prediction prediction;  // belongs to the thread that runs tasks

    State(const HandoffShape& shape, const HandoffMemory& memory, const HandoffTimes& times)
        : shape(shape),
          times(times),
          input(memory.input),
          out(memory.out),
          request(new (memory.request) Word(0)),
          done(new (memory.done) Word(0)) {}

    void perform(uint32_t word);
    void fetch_predicted(uint32_t word);
    void run_layer(const ExpertLayer* layer, uint32_t word);
    void count(size_t index, const ExpertLayer& layer, const int64_t* ids, size_t pairs, Clock::duration time);
    void keep_error(const std::string& message);
    void serve();
    template <class Work>
    bool watched(Work work);
    bool serve_request();
    void watch();
    void answer_without_running();
    void ended();
};

void Handoff::State::keep_error(const std::string& message) {
    std::lock_guard lock(mutex);
    if (error.empty()) error = message;
    ++statistics.failed;
}

// The ids are read before C4, so they are still this task's.
void Handoff::State::count(size_t index, const ExpertLayer& layer, const int64_t* ids, size_t pairs,
                           Clock::duration time) {
    std::lock_guard lock(mutex);
    used.assign(layer.experts(), 0);
    for (size_t i = 0; i < pairs; ++i)
        if (ids[i] >= 0) {
            used[static_cast<size_t>(ids[i])] = 1;
            ++uses[index][static_cast<size_t>(ids[i])];
        }
    const auto experts = static_cast<uint64_t>(std::count(used.begin(), used.end(), uint8_t{1}));
    ++statistics.tasks;
    statistics.busy_seconds += Seconds(time).count();
    statistics.experts_used += experts;
    statistics.bytes += experts * (layer.bytes() / layer.experts());
    const Prediction::Score score = prediction.score(layer, used);
    statistics.predicted += score.predicted;
    statistics.predicted_used += score.used;
}

void Handoff::State::run_layer(const ExpertLayer* layer, uint32_t word) {
    const size_t tokens = word >> kTokensAt;
    if (!layer) throw std::invalid_argument("a request names a layer that is not there");
    if (tokens > shape.max_tokens)
        throw std::invalid_argument("a request has at most " + std::to_string(shape.max_tokens) + " tokens, got " +
                                    std::to_string(tokens));
    const size_t pairs = tokens * shape.experts_per_token;
    const auto* ids = reinterpret_cast<const int64_t*>(input);
    const auto* weights = reinterpret_cast<const float*>(input + 8 * pairs);
    const auto* x = reinterpret_cast<const float*>(input + shape.x_offset(tokens));
    const Clock::time_point begin = Clock::now();
    layer->forward(x, ids, weights, tokens, shape.experts_per_token, out, !(word & kSomeRows));
    count((word & kLayerMask) - size_t{1}, *layer, ids, pairs, Clock::now() - begin);
}

void Handoff::State::perform(uint32_t word) {
    const size_t layer = (word & kLayerMask) - size_t{1}, tokens = word >> kTokensAt;
    const ExpertLayer* found = layer < kMaxLayers ? layers[layer].load(std::memory_order_acquire) : nullptr;
    std::string message = "unknown error";
    try {
        return run_layer(found, word);
    } catch (const std::exception& error) {
        message = error.what();
    } catch (...) {
    }
    std::fill_n(out, std::min(tokens, shape.max_tokens) * shape.hidden, std::numeric_limits<float>::quiet_NaN());
    keep_error("experts of layer " + std::to_string(layer) + " on " + std::to_string(tokens) + " tokens: " + message);
}

void Handoff::State::fetch_predicted(uint32_t word) {
    const size_t next = word & kLayerMask, tokens = std::min<size_t>(word >> kTokensAt, shape.max_tokens);
    const ExpertLayer* layer = next < kMaxLayers ? layers[next].load(std::memory_order_acquire) : nullptr;
    if (!layer) return;
    const auto* ids = reinterpret_cast<const int64_t*>(input + shape.predicted_offset(tokens));
    const auto must_stop = [&] {
        return request->load(std::memory_order_relaxed) != 0 || stop.load() || broken.load();
    };
    try {
        prediction.fetch(*layer, ids, tokens * shape.experts_per_token, must_stop);
    } catch (const std::bad_alloc&) {  // the fetch is optional
    }
}

// Runs a part of the serving thread's work while watch() measures its time. Returns false if another thread answers
// requests from now on; it may have answered this one.
template <class Work>
bool Handoff::State::watched(Work work) {
    busy_since.store(Clock::now().time_since_epoch().count(), std::memory_order_release);
    work();
    busy_since.store(0, std::memory_order_relaxed);
    return !broken.load() && !stop.load();
}

// Serves a request if there is one. Returns whether there was.
bool Handoff::State::serve_request() {
    const uint32_t word = request->load(std::memory_order_acquire);  // C1
    if (word == 0) return false;
    serving.store(word, std::memory_order_relaxed);
    const bool still_serving = watched([&] {
        request->store(0, std::memory_order_relaxed);  // C2, which comes before C4 by its release
        perform(word);
    });
    if (!still_serving) return true;
    serving.store(0, std::memory_order_relaxed);
    done->store(word, std::memory_order_release);  // C4
    if (word & kPredicts) watched([&] { fetch_predicted(word); });
    return true;
}

void Handoff::State::serve() {
    Clock::time_point idle_since = Clock::now();
    uint32_t pauses = 0;
    while (!stop.load(std::memory_order_relaxed) && !broken.load(std::memory_order_relaxed)) {
        if (serve_request()) {
            idle_since = Clock::now();
            pauses = 0;
            continue;
        }
        pause_cpu();
        if (++pauses < kPausesPerYield) continue;
        pauses = 0;
        sched_yield();
        const Seconds idle = Clock::now() - idle_since;
        if (idle.count() < times.idle_seconds) continue;
        std::this_thread::sleep_for(std::clamp(idle / 20, kShortestNap, kLongestNap));
        pauses = kPausesPerYield - 1;  // read the word once, then nap again
    }
    ended();
}

// Answers the request without running it. A word may be answered more than once: the serving thread may store C4 late,
// over an answer from here. The waiting stream then finds its answer at the next call.
void Handoff::State::answer_without_running() {
    if (const uint32_t word = request->exchange(0)) serving.store(word);
    if (const uint32_t word = serving.load()) done->store(word, std::memory_order_release);
}

void Handoff::State::watch() {
    const Seconds limit(times.stuck_seconds), period = std::min(limit / 4, Seconds(1));
    while (!broken.load()) {
        {
            std::unique_lock lock(mutex);
            if (changed.wait_for(lock, period, [&] { return stop.load(); })) break;
        }
        const Clock::rep since = busy_since.load(std::memory_order_acquire);
        if (since == 0 || Clock::now() - Clock::time_point(Clock::duration(since)) < limit) continue;
        keep_error("a task of the CPU's experts has not ended after " + std::to_string(times.stuck_seconds) +
                   " s; the hand-off is broken");
        broken.store(true);
    }
    while (!stop.load()) {  // only if the service is broken
        answer_without_running();
        std::this_thread::sleep_for(kAnswerPeriod);
    }
    ended();
}

void Handoff::State::ended() {
    std::lock_guard lock(mutex);
    --running_threads;
    changed.notify_all();
}

Handoff::Handoff(const HandoffShape& shape, const HandoffMemory& memory, bool serve, const HandoffTimes& times) {
    constexpr size_t kMostTokens = (size_t{1} << (32 - kTokensAt)) - 1;
    if (shape.hidden == 0 || shape.experts_per_token == 0)
        throw std::invalid_argument("hidden and experts_per_token must be positive");
    if (shape.max_tokens == 0 || shape.max_tokens > kMostTokens)
        throw std::invalid_argument("max_tokens must be from 1 to " + std::to_string(kMostTokens) + ", got " +
                                    std::to_string(shape.max_tokens));
    if (!(times.idle_seconds >= 0) || !(times.stuck_seconds > 0)) throw std::invalid_argument("times must be positive");
    for (const void* address : {static_cast<const void*>(memory.input), static_cast<const void*>(memory.out),
                                static_cast<const void*>(memory.request), static_cast<const void*>(memory.done)})
        if (!aligned(address, 64))
            throw std::invalid_argument("memory of a hand-off must begin on a cache line of 64 bytes");
    state_ = std::make_shared<State>(shape, memory, times);
    if (!serve) return;
    for (void (State::*work)() : {&State::serve, &State::watch}) {
        {
            std::lock_guard lock(state_->mutex);
            ++state_->running_threads;
        }
        try {
            std::thread thread([state = state_, work] { ((*state).*work)(); });
            pthread_setname_np(thread.native_handle(), work == &State::serve ? "ktq-handoff" : "ktq-watch");
            thread.detach();
        } catch (...) {  // the system can create no more threads
            state_->ended();
            close(1);
            throw;
        }
    }
}

Handoff::~Handoff() {
    close(1);
}

size_t Handoff::add_layer(const ExpertLayer& layer) {
    if (layer.hidden() != state_->shape.hidden)
        throw std::invalid_argument("a layer of this hand-off has a hidden size of " +
                                    std::to_string(state_->shape.hidden) + ", got " + std::to_string(layer.hidden()));
    std::lock_guard lock(state_->mutex);
    if (state_->layer_count == kMaxLayers)
        throw std::invalid_argument("a hand-off has at most " + std::to_string(kMaxLayers) + " layers");
    state_->layers[state_->layer_count].store(&layer, std::memory_order_release);
    state_->uses.emplace_back(layer.experts());
    return state_->layer_count++;
}

void Handoff::run(uint32_t word) {
    state_->perform(word);
}

void* Handoff::host_task(uint32_t word) {
    std::lock_guard lock(state_->mutex);
    return &state_->host_tasks.try_emplace(word, State::HostTask{state_.get(), word}).first->second;
}

void Handoff::run_host_function(void* task) {
    const auto& one = *static_cast<const State::HostTask*>(task);
    one.state->perform(one.word);
}

std::optional<std::string> Handoff::take_error() {
    std::lock_guard lock(state_->mutex);
    if (state_->error.empty()) return {};
    if (state_->broken.load()) return state_->error;  // permanent
    return std::exchange(state_->error, {});
}

HandoffStatistics Handoff::statistics() const {
    std::lock_guard lock(state_->mutex);
    return state_->statistics;
}

std::vector<std::vector<uint64_t>> Handoff::uses() const {
    std::lock_guard lock(state_->mutex);
    return state_->uses;
}

bool Handoff::close(double seconds) {
    std::unique_lock lock(state_->mutex);
    if (state_->stop.exchange(true)) seconds = 0;  // an earlier call has waited
    state_->changed.notify_all();
    const bool all = state_->changed.wait_for(lock, Seconds(seconds), [&] { return state_->running_threads == 0; });
    state_->answer_without_running();
    return all;
}

}  // namespace ktqueue
