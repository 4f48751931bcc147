// Where the threads of a pool run: the policy of pinning. Knows the machine (threads/topology.h) and the pool's size, no jobs.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "threads/topology.h"

namespace ktqueue {

enum class Pin { automatic, on, off };

// "auto", "on" or "off". Throws std::invalid_argument naming the text.
Pin parse_pin(const std::string& text);

// What the placement depends on.
struct Machine {
    std::vector<Cpu> cpus;  // in the affinity mask
    double quota;           // CPUs that the cgroup allows; may be huge
};

Machine this_machine();

constexpr int kAnyCpu = -1;

struct Place {
    int cpu;      // kAnyCpu: the thread goes where the system puts it
    size_t node;  // 0..nodes-1, rising with the thread's index
};

// A place for each thread of a pool; thread 0 is the caller, which is never pinned, but counts to the first node.
//
// Automatic pins only where the threads surely have the CPUs for themselves: at least 4 threads, on more than half of
// the cores of the mask (so that two pools that both pin cannot fit side by side), no more threads than CPUs, and a
// cgroup quota that covers the mask. Else several workers on one machine would all pin to its first CPUs, and a
// throttled group would stand still on a CPU while others are idle. `on` wraps around where threads outnumber CPUs.
//
// Threads that are not pinned are all of one node. `pretend_nodes` > 0 (tests): no pinning, and the threads divided
// evenly among so many nodes.
std::vector<Place> place_threads(size_t threads, Pin pin, const Machine& machine, size_t pretend_nodes = 0);

}  // namespace ktqueue
