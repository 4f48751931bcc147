#include "threads/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>

#include "threads/cpus.h"
#include "threads/pause.h"

namespace ktqueue {

namespace {

constexpr size_t kMaxThreads = 1024;
constexpr uint64_t kMaxUnitsPerLane = 0xffff;
constexpr uint32_t kPausesPerYield = 200;
constexpr uint32_t kDefaultSpinMicroseconds = 50;

// The futex words are the atomics themselves.
static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

void futex_wait(std::atomic<uint32_t>& word, uint32_t while_it_is) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, while_it_is, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int most) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
}

uint64_t next_of(uint64_t word) {
    return word >> 16 & 0xffff;
}

uint64_t end_of(uint64_t word) {
    return word & 0xffff;
}

const std::vector<Place>& checked(const std::vector<Place>& places) {
    if (places.empty() || places.size() > kMaxThreads)
        throw std::invalid_argument("threads must be from 1 to " + std::to_string(kMaxThreads) + ", got " +
                                    std::to_string(places.size()));
    for (size_t i = 0, before = 0; i < places.size(); before = places[i++].node)
        if (places[i].node != before && (i == 0 || places[i].node != before + 1))
            throw std::invalid_argument("the nodes of the threads must rise from 0 without a gap");
    return places;
}

std::vector<ThreadPool::Range> group_by_node(const std::vector<Place>& places) {
    std::vector<ThreadPool::Range> groups(places.back().node + 1);
    for (size_t i = places.size(); i-- > 0;) {
        ThreadPool::Range& group = groups[places[i].node];
        group = {i, std::max(group.end, i + 1)};
    }
    return groups;
}

// If the CPU has gone offline, the call fails and the thread runs where the system puts it.
void pin_to(int cpu) {
    if (cpu == kAnyCpu) return;
    const size_t size = static_cast<size_t>(cpu) + 1;
    if (cpu_set_t* set = CPU_ALLOC(size)) {
        const size_t bytes = CPU_ALLOC_SIZE(size);
        CPU_ZERO_S(bytes, set);
        CPU_SET_S(static_cast<size_t>(cpu), bytes, set);
        pthread_setaffinity_np(pthread_self(), bytes, set);
        CPU_FREE(set);
    }
}

}  // namespace

ThreadPool::ThreadPool(std::vector<Place> places, uint32_t spin_microseconds)
    : places_(checked(places)),
      threads_of_node_(group_by_node(places)),
      spin_microseconds_(spin_microseconds),
      lanes_(new Lane[places.size()]) {
    workers_.reserve(threads() - 1);
    try {
        for (size_t i = 1; i < threads(); ++i) {
            workers_.emplace_back([this, i] { work(i); });
            const std::string name = "ktq-kernel-" + std::to_string(i);  // at most 15 characters
            pthread_setname_np(workers_.back().native_handle(), name.c_str());
        }
    } catch (...) {  // the system can create no more threads
        end_workers();
        throw;
    }
}

ThreadPool::ThreadPool(size_t threads, uint32_t spin_microseconds)
    : ThreadPool(std::vector<Place>(std::min(threads, kMaxThreads + 1), {kAnyCpu, 0}), spin_microseconds) {}

ThreadPool::~ThreadPool() {
    end_workers();
}

void ThreadPool::end_workers() {
    stop_.store(true);
    wake_.fetch_add(1);
    wake(INT_MAX);
    for (std::thread& worker : workers_) worker.join();
}

// Rounded up, so that the caller gets a task in the smallest job.
size_t ThreadPool::first_of(size_t thread, size_t count) const {
    return (count * thread + threads() - 1) / threads();
}

ThreadPool::Range ThreadPool::node_range(size_t node, size_t count) const {
    const Range& owners = threads_of_node_[node];
    return {first_of(owners.begin, count), first_of(owners.end, count)};
}

void ThreadPool::run(size_t count, Task task, void* context) {
    if (count == 0) return;
    if (count > 0xffffffffu) throw std::invalid_argument("a job has at most 2^32 - 1 tasks");
    if (threads() == 1 || count == 1) {
        for (size_t i = 0; i < count; ++i) task(context, i);
        return;
    }
    std::lock_guard lock(job_mutex_);
    const uint64_t room = kMaxUnitsPerLane * threads();
    const uint64_t tasks_per_unit = (count + room - 1) / room;
    const uint64_t units = (count + tasks_per_unit - 1) / tasks_per_unit;
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    tasks_per_unit_.store(tasks_per_unit, std::memory_order_relaxed);
    published_ += units;
    const uint32_t job = wake_.load(std::memory_order_relaxed) + 1;
    for (size_t i = 0; i < threads(); ++i) {
        const uint64_t first = first_of(i, units), last = first_of(i + 1, units);
        if (first == last) continue;  // fewer units than threads: this lane stays empty
        lanes_[i].first.store(static_cast<uint32_t>(first), std::memory_order_relaxed);
        lanes_[i].word.store(static_cast<uint64_t>(job) << 32 | (last - first), std::memory_order_release);
    }
    wake_.store(job);
    wake(std::min<size_t>(units, threads()) - 1);

    help(0, job);
    for (uint32_t pauses = 0; !all_finished();) {
        pause_cpu();
        if (++pauses % kPausesPerYield == 0) sched_yield();
    }
    if (failed_.load(std::memory_order_acquire)) {
        std::exception_ptr error = std::move(error_);
        error_ = nullptr;
        failed_.store(false, std::memory_order_relaxed);
        std::rethrow_exception(error);
    }
}

bool ThreadPool::all_finished() const {
    uint64_t finished = 0;
    for (size_t i = 0; i < threads(); ++i) finished += lanes_[i].finished.load(std::memory_order_acquire);
    return finished == published_;
}

// Claims units of the job until none is left. One round over the lanes is enough, because they only become emptier.
void ThreadPool::help(size_t thread, uint32_t job) {
    const auto steal = [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) drain(thread, job, lanes_[i], Side::back);
    };
    const Range near = threads_of_node_[places_[thread].node];
    drain(thread, job, lanes_[thread], Side::front);
    steal(thread + 1, near.end);
    steal(near.begin, thread);
    steal(near.end, threads());
    steal(0, near.begin);
}

// Claims and performs units of one lane until it is empty or holds another job.
void ThreadPool::drain(size_t thread, uint32_t job, Lane& from, Side side) {
    uint64_t performed = 0;
    uint64_t word = from.word.load(std::memory_order_acquire);
    while (word >> 32 == job && next_of(word) < end_of(word)) {
        Task task = task_.load(std::memory_order_relaxed);
        void* context = context_.load(std::memory_order_relaxed);
        const uint64_t count = count_.load(std::memory_order_relaxed);
        const uint64_t tasks_per_unit = tasks_per_unit_.load(std::memory_order_relaxed);
        const uint64_t first = from.first.load(std::memory_order_relaxed);
        const uint64_t claimed = side == Side::front ? word + (1u << 16) : word - 1;
        if (!from.word.compare_exchange_weak(word, claimed, std::memory_order_acq_rel, std::memory_order_acquire))
            continue;
        const uint64_t unit = first + (side == Side::front ? next_of(word) : end_of(word) - 1);
        perform(task, context, unit * tasks_per_unit, std::min(count, (unit + 1) * tasks_per_unit));
        ++performed;
        word = from.word.load(std::memory_order_acquire);
    }
    if (performed == 0) return;
    std::atomic<uint64_t>& finished = lanes_[thread].finished;
    finished.store(finished.load(std::memory_order_relaxed) + performed, std::memory_order_release);
}

void ThreadPool::perform(Task task, void* context, size_t begin, size_t end) {
    for (size_t index = begin; index < end; ++index) {
        if (failed_.load(std::memory_order_relaxed)) return;
        try {
            task(context, index);
        } catch (...) {
            if (!failed_.exchange(true)) error_ = std::current_exception();
        }
    }
}

void ThreadPool::work(size_t thread) {
    pin_to(places_[thread].cpu);
    for (;;) {
        const uint32_t seen = wake_.load(std::memory_order_acquire);
        if (stop_.load()) return;
        help(thread, seen);
        wait_for_job(seen);
    }
}

// Returns when `wake_` differs from `seen`, and sometimes earlier.
void ThreadPool::wait_for_job(uint32_t seen) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point idle_since = Clock::now();
    const auto spin = std::chrono::microseconds(spin_microseconds_);
    for (uint32_t pauses = 0; wake_.load(std::memory_order_relaxed) == seen;) {
        pause_cpu();
        if (++pauses % kPausesPerYield != 0) continue;
        sched_yield();
        if (Clock::now() - idle_since < spin) continue;
        sleepers_.fetch_add(1);
        futex_wait(wake_, seen);
        sleepers_.fetch_sub(1);
        return;
    }
}

// Wakes at most this many sleepers. The kernel wakes them one by one, at a microsecond or more each.
void ThreadPool::wake(size_t most) {
    if (sleepers_.load() > 0) futex_wake(wake_, static_cast<int>(most));
}

namespace {

// Never destroyed: a thread may still be working when the process exits.
struct SharedPool {
    std::mutex mutex;
    std::shared_ptr<ThreadPool> pool;
};

SharedPool& shared() {
    static SharedPool& current = *new SharedPool;
    return current;
}

// The workers do not survive a fork, and the old pool's locks may be held. So the child abandons the old pool without
// freeing it.
void forget_pool_in_child() {
    new (&shared()) SharedPool;
}

void watch_forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
    (void)registered;
}

std::shared_ptr<ThreadPool> make_pool(size_t threads, uint32_t spin_microseconds, Pin pin, size_t pretend_nodes) {
    if (threads < 1 || threads > kMaxThreads)
        throw std::invalid_argument("threads must be from 1 to " + std::to_string(kMaxThreads) + ", got " +
                                    std::to_string(threads));
    return std::make_shared<ThreadPool>(place_threads(threads, pin, this_machine(), pretend_nodes), spin_microseconds);
}

}  // namespace

std::shared_ptr<ThreadPool> shared_pool() {
    SharedPool& current = shared();
    std::lock_guard lock(current.mutex);
    if (!current.pool) {
        watch_forks();
        current.pool = make_pool(default_threads(), kDefaultSpinMicroseconds, Pin::automatic, 0);
    }
    return current.pool;
}

void set_shared_pool(size_t threads, uint32_t spin_microseconds, Pin pin, size_t pretend_nodes) {
    auto fresh = make_pool(threads, spin_microseconds, pin, pretend_nodes);
    SharedPool& current = shared();
    std::lock_guard lock(current.mutex);
    watch_forks();
    current.pool.swap(fresh);  // the old pool, if idle, is destroyed with `fresh`
}

}  // namespace ktqueue
