// Where the threads of a pool run: the policy of pinning. Knows the machine (threads/cpus.h) and the pool's size.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "threads/cpus.h"

namespace ktqueue {

enum class Pin { automatic, on, off };

// Parses "auto", "on" or "off". Throws std::invalid_argument that quotes the text.
Pin parse_pin(const std::string& text);

// The facts that the placement depends on.
struct Machine {
    std::vector<Cpu> cpus;  // in the affinity mask
    double quota;           // CPUs that the cgroup allows; may be huge
};

Machine this_machine();

constexpr int kAnyCpu = -1;

struct Place {
    int cpu;      // kAnyCpu: the system chooses
    size_t node;  // 0..nodes-1, not falling with the thread's index
};

// Chooses a place for each thread of a pool. Thread 0 is the caller, which is never pinned, but counts to the first
// node.
//
// `automatic` pins only if the threads surely have the CPUs for themselves: at least 4 threads, on more than half of
// the cores of the mask (so that two pools cannot both pin), no more threads than CPUs, and a cgroup quota that covers
// the mask. Otherwise several workers on one machine would all pin to its first CPUs, and a throttled group would wait
// for one CPU while others are idle. `on` puts several threads on a CPU if there are more threads than CPUs.
//
// Threads that are not pinned all belong to one node. `pretend_nodes` > 0 (tests): no pinning, and the threads are
// divided evenly among that many nodes.
std::vector<Place> place_threads(size_t threads, Pin pin, const Machine& machine, size_t pretend_nodes = 0);

}  // namespace ktqueue
