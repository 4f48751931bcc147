// A persistent pool that runs `count` independent tasks and returns when all are finished. Knows nothing about the
// tasks.
//
// The caller works too, as thread 0, so a pool of n threads has n - 1 workers. Each thread owns a range of the tasks,
// all of nearly equal length, and walks it in order: tasks that are adjacent in memory form one long stream. A thread
// that has finished its own range takes single tasks from the end of the others' ranges, those of its own NUMA node
// first. A worker that sleeps or is descheduled never delays a job, because a job ends when its tasks are finished, not
// when all workers have reported.
//
// How a job is handed out without a lock. Each thread has a *lane* with one word, job number << 32 | next << 16 | end:
// the unclaimed units of its range, counted from the lane's first unit. (A unit is one task, or a few in very large
// jobs.)
//
// 1. The fields of a job (task, context, each lane's first, ...) are written only by the caller that holds job_mutex_,
//   and only when all units of the previous job are finished. At that time no lane has next < end.
// 2. The caller then stores the lanes' words. Nobody else writes a word meanwhile: otherwise a word changes only by a
//   compare-exchange that claims a unit, which requires next < end.
// 3. A thread that looks for work reads a word with next < end, reads the fields, then claims by compare-exchange. If
//   that succeeds, the word did not change in between, so this unit of that job had not even started. So the job was
//   not finished, and by rule 1 its fields were not overwritten. If it fails, the fields it read are not used. A worker
//   may be late by any number of jobs: the job number makes its claim fail (until it wraps: 2^32 jobs during one
//   claim). A worker looks only for units of the job that `wake_` named, so it begins each job with its own lane.
// 4. Each thread counts its finished units in a counter that only it writes and that never falls. A sum over the
//   counters, read one by one, is at most the true number. When it equals the number of units published so far, all are
//   finished, and their writes are visible (release, acquire).
//
// Idle workers watch `wake_`, the number of the newest job. They spin (with a yield after some pauses, since two
// spinners may share a CPU), then sleep in a futex. A worker increments `sleepers_` before it sleeps, and the caller
// reads `sleepers_` after it has changed `wake_`, both sequentially consistent. So either the caller sees the sleeper
// or the kernel sees the new word.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "threads/thread_placement.h"

namespace ktqueue {

class ThreadPool {
  public:
    using Task = void (*)(void* context, size_t index);

    // One thread per place. `spin_microseconds`: how long an idle worker spins before it sleeps. Throws
    // std::invalid_argument unless there are 1 to 1024 places whose nodes rise from 0 without a gap.
    ThreadPool(std::vector<Place> places, uint32_t spin_microseconds);

    // `threads` threads that the system places.
    ThreadPool(size_t threads, uint32_t spin_microseconds);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    size_t threads() const { return places_.size(); }

    // NUMA nodes that the threads are pinned to; 1 if they are not pinned.
    size_t nodes() const { return threads_of_node_.size(); }

    size_t node_of(size_t thread) const { return places_[thread].node; }

    struct Range {
        size_t begin, end;
    };

    // The tasks of a job of `count` that the threads of `node` own (approximate above 65,535 tasks per thread). The
    // ranges of nodes 0, 1, ... follow one another. If tasks are ordered by the node of their data, with as many per
    // node as its range has, each thread reads memory of its own node.
    Range node_range(size_t node, size_t count) const;

    // The same for one thread.
    Range thread_range(size_t thread, size_t count) const {
        return {first_of(thread, count), first_of(thread + 1, count)};
    }

    // Runs task(context, 0..count-1). One job at a time: a second caller waits, and a task must not call this. The
    // first exception of a task is rethrown here after the job has ended; tasks not started by then are skipped. Throws
    // std::invalid_argument unless count < 2^32.
    void run(size_t count, Task task, void* context);

    // Runs body(index) for 0..count-1.
    template <class Body>
    void for_each(size_t count, Body&& body) {
        using Plain = std::remove_reference_t<Body>;
        run(
            count, [](void* context, size_t index) { (*static_cast<Plain*>(context))(index); },
            const_cast<void*>(static_cast<const void*>(&body)));
    }

  private:
    // The state of one thread, on cache lines of its own (two, because processors fetch lines in pairs).
    struct alignas(128) Lane {
        std::atomic<uint64_t> word{0};
        std::atomic<uint32_t> first{0};     // unit that next = 0 stands for; a field of the job
        std::atomic<uint64_t> finished{0};  // units that this thread has finished in its lifetime
    };
    enum class Side { front, back };

    size_t first_of(size_t thread, size_t count) const;
    void end_workers();
    void work(size_t thread);
    void help(size_t thread, uint32_t job);
    void drain(size_t thread, uint32_t job, Lane& from, Side side);
    void perform(Task task, void* context, size_t begin, size_t end);
    bool all_finished() const;
    void wake(size_t most);
    void wait_for_job(uint32_t seen);

    const std::vector<Place> places_;
    const std::vector<Range> threads_of_node_;
    const uint32_t spin_microseconds_;
    const std::unique_ptr<Lane[]> lanes_;
    std::mutex job_mutex_;
    uint64_t published_ = 0;                      // units of all jobs so far; guarded by job_mutex_
    alignas(128) std::atomic<uint32_t> wake_{0};  // number of the newest job; the word that sleepers watch
    std::atomic<Task> task_{nullptr};             // fields of the job
    std::atomic<void*> context_{nullptr};
    std::atomic<uint64_t> count_{0};           // tasks
    std::atomic<uint64_t> tasks_per_unit_{1};  // the last unit may have fewer
    std::atomic<bool> failed_{false};
    alignas(128) std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::exception_ptr error_;  // guarded by failed_: written only by the task that sets it
    std::vector<std::thread> workers_;
};

// The pool of this process, created at its first use with default_threads(). After a fork the child gets a new one.
std::shared_ptr<ThreadPool> shared_pool();

// Replaces the pool of this process. Jobs that run on the old one finish there. `pretend_nodes`: see place_threads.
// Throws std::invalid_argument unless 1 <= threads <= 1024.
void set_shared_pool(size_t threads, uint32_t spin_microseconds, Pin pin = Pin::automatic, size_t pretend_nodes = 0);

// Runs body(0 .. tokens - 1) in any order. `work`: roughly how many numbers one call of the body processes.
template <class Body>
void for_tokens(size_t tokens, size_t work, Body&& body) {
    constexpr size_t kTask = 32 * 1024;  // numbers: some microseconds, several times the cost of handing out a task
    const size_t step = std::max<size_t>(1, kTask / std::max<size_t>(1, work));
    if (tokens <= step) {
        for (size_t t = 0; t < tokens; ++t) body(t);
        return;
    }
    shared_pool()->for_each((tokens + step - 1) / step, [&](size_t task) {
        for (size_t t = task * step; t < std::min(tokens, (task + 1) * step); ++t) body(t);
    });
}

}  // namespace ktqueue
