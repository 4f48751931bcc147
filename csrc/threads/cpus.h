// Which CPUs this process may use, which of them share a core or a NUMA node, and how many the cgroup allows. Knows
// nothing about threads.
//
// Source: Linux, /sys/devices/system (Documentation/ABI/stable/sysfs-devices-system-cpu and -node). If a file is
// missing (another kernel, a container that hides it), the simplest machine is assumed: one core per CPU, one node.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ktqueue {

struct Cpu {
    size_t id;    // the kernel's number
    size_t core;  // the lowest id among the CPUs of its physical core
    size_t node;  // the kernel's number
};

// The ids in a list such as "0-3,8,10-11\n", ascending in each range. The first character that does not fit ends the
// list.
std::vector<size_t> parse_cpu_list(const std::string& text);

// CPUs in the affinity mask of the calling thread, ascending.
std::vector<size_t> allowed_cpus();

// The core and node of each CPU in `ids`. `root`: /sys/devices/system, or a copy of its layout.
std::vector<Cpu> read_topology(const std::vector<size_t>& ids, const std::string& root = "/sys/devices/system");

// The number of physical cores that `cpus` belong to.
size_t count_cores(const std::vector<Cpu>& cpus);

// Chooses `count` of the CPUs for one busy thread each: first one CPU of every core, from each node in turn, so that
// all cores and memory controllers are used before any is shared; then the second CPU of every core, and so on.
// Returned node by node. `count` is at most cpus.size().
std::vector<Cpu> spread(const std::vector<Cpu>& cpus, size_t count);

// The number of threads that keep this machine busy: the physical cores in the affinity mask, limited by the cgroup's
// CPU quota (version 1 or 2), rounded up; at least 1. A core's second thread adds no memory bandwidth and little
// arithmetic.
size_t default_threads();

// The smallest CPU quota, in CPUs, of the groups named in `groups_file` (such as /proc/self/cgroup) and their
// ancestors, under the cgroup file system at `mount`. A very large number if there is no quota.
double cgroup_cpus(const std::string& groups_file, const std::string& mount);

}  // namespace ktqueue
