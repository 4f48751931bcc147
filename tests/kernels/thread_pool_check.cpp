// Checks of the thread pool and the CPU budget that need C++. Built and run by test_threads.py; exits 0 if all hold.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu_budget.h"
#include "thread_pool.h"

using namespace ktqueue;

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

// Every task of every job runs exactly once, and is over when run() returns.
void every_task_once(uint32_t spin_microseconds, size_t threads, size_t jobs) {
    ThreadPool pool(threads, spin_microseconds);
    std::vector<int> runs(64);  // not atomic: a task's write must be visible to the caller, and to no other task
    for (size_t job = 0; job < jobs; ++job) {
        const size_t count = job % 64;
        std::fill(runs.begin(), runs.end(), 0);
        pool.for_each(count, [&](size_t i) { ++runs[i]; });
        for (size_t i = 0; i < runs.size(); ++i) require(runs[i] == (i < count), "each task runs once");
        if (job % 500 == 0) usleep(2000);  // lets the workers fall asleep
    }
}

void exceptions_reach_the_caller() {
    ThreadPool pool(3, 20);
    for (int round = 0; round < 200; ++round) {
        bool caught = false;
        try {
            pool.for_each(40, [&](size_t i) {
                if (i == 17) throw std::runtime_error("task 17");
            });
        } catch (const std::runtime_error& error) {
            caught = std::string(error.what()) == "task 17";
        }
        require(caught, "the exception of a task reaches the caller");
        std::atomic<int> done{0};
        pool.for_each(40, [&](size_t) { ++done; });
        require(done == 40, "the pool works after an exception");
    }
}

void callers_take_turns() {
    ThreadPool pool(2, 20);
    std::vector<std::thread> callers;
    std::atomic<int> done{0};
    for (int caller = 0; caller < 4; ++caller)
        callers.emplace_back([&] {
            for (int job = 0; job < 300; ++job) pool.for_each(10, [&](size_t) { ++done; });
        });
    for (std::thread& caller : callers) caller.join();
    require(done == 4 * 300 * 10, "jobs of several callers all run");
}

void the_pool_may_be_replaced_under_a_job() {
    std::atomic<bool> stop{false};
    std::thread replacing([&] {
        for (size_t i = 0; !stop; ++i) set_shared_pool(1 + i % 3, 20);
    });
    for (int job = 0; job < 500; ++job) {
        std::atomic<int> done{0};
        shared_pool()->for_each(10, [&](size_t) { ++done; });
        require(done == 10, "a job ends on the pool it began on");
    }
    stop = true;
    replacing.join();
}

void a_forked_child_gets_a_pool_of_its_own() {
    set_shared_pool(3, 50);
    std::atomic<int> done{0};
    shared_pool()->for_each(10, [&](size_t) { ++done; });
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        done = 0;
        shared_pool()->for_each(2, [&](size_t) {  // needs two threads at once
            ++done;
            while (done < 2) usleep(100);
        });
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(status == 0, "a forked child computes");
}

void sizes_are_checked() {
    for (size_t threads : {size_t{0}, size_t{1025}}) {
        bool refused = false;
        try {
            ThreadPool pool(threads, 0);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        require(refused, "0 and 1025 threads are refused");
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count == 3) {  // a cgroup file and a mount: print the quota found there
        std::printf("%g\n", cgroup_cpus(arguments[1], arguments[2]));
        return 0;
    }
    every_task_once(0, 3, 2000);
    every_task_once(50, 2, 20000);
    every_task_once(50, 1, 100);
    exceptions_reach_the_caller();
    callers_take_turns();
    the_pool_may_be_replaced_under_a_job();
    sizes_are_checked();
#if !defined(__SANITIZE_THREAD__)  // the sanitizer does not follow a fork of several threads
    a_forked_child_gets_a_pool_of_its_own();
#endif
    return 0;
}
