#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpu_budget.h"

namespace ktqueue {

namespace {

constexpr uint32_t kPausesPerYield = 200;
constexpr uint32_t kDefaultSpinMicroseconds = 50;

void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(size_t threads, uint32_t spin_microseconds) : spin_microseconds_(spin_microseconds) {
    if (threads < 1 || threads > 1024)
        throw std::invalid_argument("threads must be from 1 to 1024, got " + std::to_string(threads));
    workers_.reserve(threads - 1);
    for (size_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
    stop_.store(true);
    wake_.fetch_add(1);
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(size_t count, Task task, void* context) {
    if (count == 0) return;
    if (count > 0xffffffffu) throw std::invalid_argument("a job has at most 2^32 - 1 tasks");
    if (workers_.empty() || count == 1) {
        for (size_t i = 0; i < count; ++i) task(context, i);
        return;
    }
    std::lock_guard lock(job_mutex_);
    count_.store(count, std::memory_order_relaxed);
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(job << 32 | count, std::memory_order_release);
    wake_.fetch_add(1, std::memory_order_release);
    wake_.notify_all();

    help();
    for (uint32_t pauses = 0; finished_.load(std::memory_order_acquire) != count;) {
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

// Takes tasks of the current job until none is left to start.
void ThreadPool::help() {
    for (;;) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        const uint64_t left = ticket & 0xffffffffu;
        if (left == 0) return;
        const uint64_t count = count_.load(std::memory_order_relaxed);
        Task task = task_.load(std::memory_order_relaxed);
        void* context = context_.load(std::memory_order_relaxed);
        if (ticket_.compare_exchange_strong(ticket, ticket - 1, std::memory_order_acq_rel))
            perform(task, context, count - left);
    }
}

void ThreadPool::perform(Task task, void* context, size_t index) {
    if (!failed_.load(std::memory_order_relaxed)) {
        try {
            task(context, index);
        } catch (...) {
            if (!failed_.exchange(true)) error_ = std::current_exception();
        }
    }
    finished_.fetch_add(1, std::memory_order_acq_rel);
}

void ThreadPool::work() {
    using Clock = std::chrono::steady_clock;
    const auto spin = std::chrono::microseconds(spin_microseconds_);
    for (;;) {
        const uint32_t seen = wake_.load(std::memory_order_acquire);
        if (stop_.load()) return;
        help();
        const Clock::time_point idle_since = Clock::now();
        for (uint32_t pauses = 0; wake_.load(std::memory_order_relaxed) == seen;) {
            pause_cpu();
            if (++pauses % kPausesPerYield != 0) continue;
            sched_yield();
            if (Clock::now() - idle_since >= spin) {
                wake_.wait(seen, std::memory_order_acquire);
                break;
            }
        }
    }
}

namespace {

// Never destroyed: a thread may still be at work when the process exits.
struct SharedPool {
    std::mutex mutex;
    std::shared_ptr<ThreadPool> pool;
};

SharedPool& shared() {
    static SharedPool& one = *new SharedPool;
    return one;
}

// The workers did not survive the fork and the old pool's locks may be held: leave it behind, unfreed.
void forget_pool_in_child() {
    new (&shared()) SharedPool;
}

void watch_forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
    (void)registered;
}

}  // namespace

std::shared_ptr<ThreadPool> shared_pool() {
    SharedPool& one = shared();
    std::lock_guard lock(one.mutex);
    if (!one.pool) {
        watch_forks();
        one.pool = std::make_shared<ThreadPool>(default_threads(), kDefaultSpinMicroseconds);
    }
    return one.pool;
}

void set_shared_pool(size_t threads, uint32_t spin_microseconds) {
    auto fresh = std::make_shared<ThreadPool>(threads, spin_microseconds);
    SharedPool& one = shared();
    std::lock_guard lock(one.mutex);
    watch_forks();
    one.pool.swap(fresh);  // the old pool, if idle, ends when `fresh` goes
}

}  // namespace ktqueue
