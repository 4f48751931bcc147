// A persistent pool that runs `count` independent tasks and returns when all are done. Knows nothing of the tasks.
//
// The caller works too, so a pool of n threads has n - 1 workers. Tasks are handed out one at a time, in order, to
// whoever is free; a worker that sleeps or is descheduled never holds a job up, because a job ends when its tasks have
// ended, not when all workers have reported.
//
// How a job is handed out without a lock: `ticket_` holds (job number << 32 | tasks not yet started). The fields of a
// job are written while that count is 0, before the new ticket is published. A worker reads a ticket with tasks left,
// reads the fields, then claims a task by a compare-exchange on the ticket. If that succeeds the job had an unstarted
// task all the time between, so it cannot have ended and its fields cannot have been overwritten; if it fails they are
// not used.
//
// Waiting workers spin (with a yield after some pauses, for two spinners may share one CPU), then sleep in a futex.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ktqueue {

class ThreadPool {
  public:
    using Task = void (*)(void* context, size_t index);

    // Throws std::invalid_argument unless 1 <= threads <= 1024. `spin_microseconds`: how long an idle worker spins.
    ThreadPool(size_t threads, uint32_t spin_microseconds);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    size_t threads() const { return workers_.size() + 1; }

    // Runs task(context, 0..count-1). One job at a time: a second caller waits. The first exception that a task throws
    // is thrown here after the job has ended; tasks not yet started by then are skipped. count < 2^32.
    void run(size_t count, Task task, void* context);

    // Runs body(index) for 0..count-1.
    template <class Body>
    void for_each(size_t count, Body&& body) {
        run(count, [](void* context, size_t index) { (*static_cast<Body*>(context))(index); }, &body);
    }

  private:
    void work();
    void help();
    void perform(Task task, void* context, size_t index);

    std::mutex job_mutex_;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint64_t> finished_{0};  // tasks of the current job that have ended
    std::atomic<uint32_t> wake_{0};                  // number of the newest job; the word that sleepers watch
    std::atomic<uint64_t> count_{0};
    std::atomic<Task> task_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;  // guarded by failed_: only the task that sets it first writes here
    std::atomic<bool> stop_{false};
    const uint32_t spin_microseconds_;
    std::vector<std::thread> workers_;
};

// The pool of this process, made at its first use with default_threads(). After a fork the child gets a new one.
std::shared_ptr<ThreadPool> shared_pool();

// Replaces the pool of this process. Jobs that run on the old one end there.
void set_shared_pool(size_t threads, uint32_t spin_microseconds);

}  // namespace ktqueue
