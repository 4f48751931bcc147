// Checks of the thread pool that need C++. Built and run by test_threads.py, also under sanitizers. Exits with 0 if all
// hold.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>

#include "threads/thread_pool.h"

namespace {

std::atomic<bool> workers_pause{false};

// Called after a thread has read a job and before its claim.
void pause_at_random() {
    static const pid_t caller = getpid();
    if (workers_pause && gettid() != caller) usleep(1 + static_cast<unsigned>(rand()) % 300);
}

}  // namespace

// The pool itself, with a pause before each claim.
#define compare_exchange_weak(word, ...) compare_exchange_weak((pause_at_random(), word), __VA_ARGS__)
#include "threads/thread_pool.cpp"
#undef compare_exchange_weak

using namespace ktqueue;

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

// Every task of every job runs exactly once, and has finished when run() returns.
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

// A worker that is delayed between reading a job and its claim must not take the next job's task: the lanes of equal
// jobs differ only in their number.
void late_workers_take_nothing() {
    ThreadPool pool(3, 1000);
    std::vector<int> odd(6), even(6);
    const auto count = [](std::vector<int>& runs, size_t i) {
        if (i == 0) usleep(50);  // the first task is the caller's: meanwhile the workers' lanes do not change
        ++runs[i];
    };
    const auto count_odd = [&](size_t i) { count(odd, i); };
    const auto count_even = [&](size_t i) { count(even, i); };
    workers_pause = true;
    for (int round = 1; round <= 500; ++round) {
        pool.for_each(odd.size(), count_odd);
        pool.for_each(even.size(), count_even);
        for (size_t i = 0; i < 6; ++i) require(odd[i] == round && even[i] == round, "late workers take nothing");
    }
    workers_pause = false;
}

// More tasks than the lanes can hold are handed out a few at a time.
void large_jobs_are_whole(size_t threads, size_t count) {
    ThreadPool pool(threads, 50);
    std::vector<unsigned char> runs(count + 8, 0);
    pool.for_each(count, [&](size_t i) { ++runs[i]; });
    for (size_t i = 0; i < runs.size(); ++i) require(runs[i] == (i < count), "large jobs are whole");
}

// Records which tasks each thread ran, in order. Every thread first waits until all have begun. Then the workers wait
// in their first task until `released` tasks have finished.
std::vector<std::vector<size_t>> record(ThreadPool& pool, size_t count, int released) {
    static uint64_t recordings = 0;
    const uint64_t recording = ++recordings;
    const std::thread::id caller = std::this_thread::get_id();
    std::vector<std::vector<size_t>> runs(pool.threads());
    std::atomic<size_t> begun{0};
    std::atomic<int> ended{0};
    pool.for_each(count, [&](size_t i) {
        thread_local size_t slot;
        thread_local uint64_t last = 0;
        if (last != recording) {  // this thread's first task
            last = recording;
            slot = begun.fetch_add(1);
            while (begun < pool.threads()) usleep(10);
            if (std::this_thread::get_id() != caller)
                while (ended < released) usleep(10);
        }
        runs[slot].push_back(i);
        ++ended;
    });
    std::sort(runs.begin(), runs.end());  // by first task
    return runs;
}

void a_thread_walks_its_range_in_order() {
    ThreadPool pool(2, 50);
    for (int round = 0; round < 100; ++round) {
        const auto runs = record(pool, 20, 0);
        require(runs[0].size() + runs[1].size() == 20, "all tasks run");
        for (size_t thread = 0; thread < 2; ++thread) {
            const size_t begin = thread * 10, end = begin + 10;
            size_t own = begin, other = thread == 0 ? 20 : 10;
            for (size_t i : runs[thread]) {
                if (i >= begin && i < end)
                    require(i == own++, "a thread walks its own range from the front, in order");
                else
                    require(i == --other, "a thread takes from the end of another's range");
            }
        }
    }
}

void the_nearest_are_helped_first() {
    ThreadPool pool(place_threads(4, Pin::off, this_machine(), 2), 50);
    require(pool.nodes() == 2 && pool.node_of(0) == 0 && pool.node_of(1) == 0 && pool.node_of(2) == 1, "two nodes");
    require(pool.node_range(0, 13).begin == 0 && pool.node_range(0, 13).end == 7, "tasks of the first node");
    require(pool.node_range(1, 13).begin == 7 && pool.node_range(1, 13).end == 13, "tasks of the last node");
    const std::vector<size_t> expected = {0, 1, 2, 5, 4, 8, 7, 11, 10};  // the workers still run 3, 6 and 9
    for (int round = 0; round < 20; ++round)
        require(record(pool, 12, 9)[0] == expected, "the nearest are helped first");
}

// A worker that waits in its task delays no other task.
void tasks_of_a_held_thread_are_stolen() {
    ThreadPool pool(3, 50);
    for (size_t held : {0, 10, 29}) {
        std::atomic<int> ended{0};
        pool.for_each(30, [&](size_t i) {
            while (i == held && ended < 29) usleep(10);
            ++ended;
        });
        require(ended == 30, "tasks of a held thread are stolen");
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
        const int together = static_cast<int>(std::min<size_t>(2, default_threads()));
        shared_pool()->for_each(2, [&](size_t) {  // needs two threads at once, if there are two CPUs
            ++done;
            while (done < together) usleep(100);
        });
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(status == 0, "a forked child computes");
}

void wrong_places_are_refused() {
    std::vector<std::vector<Place>> wrong = {{}, std::vector<Place>(1025, Place{kAnyCpu, 0})};
    wrong.push_back({{kAnyCpu, 1}});
    wrong.push_back({{kAnyCpu, 0}, {kAnyCpu, 2}});
    wrong.push_back({{kAnyCpu, 0}, {kAnyCpu, 1}, {kAnyCpu, 0}});
    for (const std::vector<Place>& places : wrong) {
        bool refused = false;
        try {
            ThreadPool pool(places, 0);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        require(refused, "a wrong number of threads or order of nodes is refused");
    }
}

// In a child process, because the limit remains.
void no_thread_left_is_an_exception() {
    const pid_t child = fork();
    if (child == 0) {
        const rlimit little = {512 << 20, 512 << 20};
        setrlimit(RLIMIT_AS, &little);
        try {
            ThreadPool pool(1024, 0);
        } catch (const std::system_error&) {
            _exit(0);
        }
        _exit(1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(status == 0, "a thread that cannot start is an exception");
}

}  // namespace

int main() {
    every_task_once(0, 3, 2000);
    every_task_once(50, 2, 20000);
    every_task_once(50, 7, 2000);
    every_task_once(50, 1, 100);
    late_workers_take_nothing();
    large_jobs_are_whole(2, 2 * 0xffff);
    large_jobs_are_whole(2, 2 * 0xffff + 1);
    large_jobs_are_whole(3, 500'000);
    a_thread_walks_its_range_in_order();
    the_nearest_are_helped_first();
    tasks_of_a_held_thread_are_stolen();
    exceptions_reach_the_caller();
    callers_take_turns();
    the_pool_may_be_replaced_under_a_job();
    wrong_places_are_refused();
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // sanitizers do not follow forks
    a_forked_child_gets_a_pool_of_its_own();
    no_thread_left_is_an_exception();
#endif
    return 0;
}
