// A persistent pool that runs `count` independent tasks and returns when all are done. Knows nothing of the tasks.
//
// The caller works too, as thread 0, so a pool of n threads has n - 1 workers. Each thread owns a range of the tasks, of
// nearly equal length, thread after thread, and walks it in order: tasks that lie one after the other in memory are one
// long stream. A thread that is through with its own takes single tasks from the end of the others' ranges, those of
// its own NUMA node first. A worker that sleeps or is descheduled never holds a job up, because a job ends when its
// tasks have ended, not when all workers have reported.
//
// How a job is handed out without a lock. Each thread has a *lane* with one word: job number << 32 | next << 16 | end,
// the unclaimed units of its range, counted from the lane's first. (A unit is one task, or a few in very large jobs.)
//
// 1. The fields of a job (task, context, ..., each lane's first) are written only by the caller that holds job_mutex_,
//    and only when all units of the job before have ended. Then no lane has next < end.
// 2. The caller then stores the lanes' words. No one else writes a word meanwhile, for a word is otherwise changed only
//    by a compare-exchange that claims a unit, so only from one with next < end.
// 3. A thread that looks for work reads a word with next < end, reads the fields, then claims by compare-exchange. If
//    that succeeds, the word was the same all the time between, so that this unit of that job was not even started; so
//    the job had not ended, and by 1 its fields were not overwritten. If it fails, what was read is not used. A worker
//    may be late by any number of jobs: the job number makes it fail (until it wraps: 2^32 jobs within one claim).
//    It looks only for units of the job that `wake_` named, so it begins each job with its own lane.
// 4. Each thread counts the units that it has ended in a counter of its own, which only it writes and which never goes
//    back. A sum over the counters, read one by one, is at most the true number; when it equals the number of units
//    published up to this job, all have ended, and what they wrote is visible (release, acquire).
//
// Idle workers watch `wake_`, the number of the newest job. They spin (with a yield after some pauses, for two spinners
// may share one CPU), then sleep in a futex. A worker announces itself in `sleepers_` before it sleeps, and the caller looks there after it has
// changed `wake_`, both sequentially consistent: either the caller sees the sleeper or the kernel sees the new word.
#pragma once

#include <atomic>
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

    // A thread for each place, where the place says. `spin_microseconds`: how long an idle worker spins.
    // Throws std::invalid_argument unless there are 1 to 1024 places, their nodes rising from 0 without a gap.
    ThreadPool(std::vector<Place> places, uint32_t spin_microseconds);

    // `threads` that the system places.
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

    // The tasks of a job of `count` that the threads of `node` own (of more than 65,535 a thread: about). Ranges of nodes
    // 0, 1, ... follow one another: order the tasks by the node of their data, and as many of each as the range holds, and
    // each thread reads near memory.
    Range node_range(size_t node, size_t count) const;

    // The same for one thread.
    Range thread_range(size_t thread, size_t count) const {
        return {first_of(thread, count), first_of(thread + 1, count)};
    }

    // Runs task(context, 0..count-1). One job at a time: a second caller waits; a task must not call this. The first
    // exception that a task throws is thrown here after the job has ended; tasks not yet started by then are skipped.
    // Throws std::invalid_argument unless count < 2^32.
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
    // What one thread owns, on cache lines of its own (two: processors fetch lines in pairs).
    struct alignas(128) Lane {
        std::atomic<uint64_t> word{0};
        std::atomic<uint32_t> first{0};  // unit that next = 0 stands for; a field of the job
        std::atomic<uint64_t> ended{0};  // units that this thread has ended in all its life
    };
    enum class Side { front, back };

    size_t first_of(size_t thread, size_t count) const;
    void end_workers();
    void work(size_t thread);
    void help(size_t thread, uint32_t job);
    void drain(size_t thread, uint32_t job, Lane& from, Side side);
    void perform(Task task, void* context, size_t begin, size_t end);
    bool all_ended() const;
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
    std::atomic<uint64_t> tasks_per_unit_{1};  // of the last unit there may be fewer
    std::atomic<bool> failed_{false};
    alignas(128) std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::exception_ptr error_;  // guarded by failed_: only the task that sets it first writes here
    std::vector<std::thread> workers_;
};

// The pool of this process, made at its first use with default_threads(). After a fork the child gets a new one.
std::shared_ptr<ThreadPool> shared_pool();

// Replaces the pool of this process. Jobs that run on the old one end there. `pretend_nodes`: see place_threads.
// Throws std::invalid_argument unless 1 <= threads <= 1024.
void set_shared_pool(size_t threads, uint32_t spin_microseconds, Pin pin = Pin::automatic, size_t pretend_nodes = 0);

}  // namespace ktqueue
