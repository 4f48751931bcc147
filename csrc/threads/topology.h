// Which CPUs this process may run on, and which of them share a core or a NUMA node. Knows nothing of threads.
//
// Source: Linux, /sys/devices/system (Documentation/ABI/stable/sysfs-devices-system-cpu and -node). What is not there
// (another kernel, a container that hides it) is taken for the simplest machine: a core for each CPU, one node.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ktqueue {

struct Cpu {
    size_t id;    // as the kernel counts
    size_t core;  // the lowest id among the CPUs of its physical core
    size_t node;  // as the kernel counts
};

// The ids in a list such as "0-3,8,10-11\n", ascending in each range; what is not a number ends the list.
std::vector<size_t> parse_cpu_list(const std::string& text);

// CPUs in the affinity mask of the calling thread, ascending.
std::vector<size_t> allowed_cpus();

// Core and node of each CPU of `ids`. `root`: /sys/devices/system, or a copy of its layout.
std::vector<Cpu> read_topology(const std::vector<size_t>& ids, const std::string& root = "/sys/devices/system");

// Physical cores that `cpus` belong to.
size_t count_cores(const std::vector<Cpu>& cpus);

// `count` of the CPUs, for one busy thread each: first one CPU of every core, in turn from each node, so that all cores
// and all memory controllers are used before any is shared; then the second of every core, and so on. Returned node by
// node. `count` at most cpus.size().
std::vector<Cpu> spread(const std::vector<Cpu>& cpus, size_t count);

}  // namespace ktqueue
