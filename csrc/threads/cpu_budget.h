// How many CPUs this process may use. Knows nothing of what they are for.
#pragma once

#include <cstddef>
#include <string>

namespace ktqueue {

// Threads that keep this machine busy: physical cores that the affinity mask touches (the second thread of a core adds
// no memory bandwidth and little arithmetic), lowered to the cgroup's CPU quota (version 1 or 2), rounded up; at least 1.
size_t default_threads();

// The tightest CPU quota, in CPUs, of the groups that `groups_file` (such as /proc/self/cgroup) names, their ancestors
// included, under the cgroup file system at `mount`; a very large number where there is none.
double cgroup_cpus(const std::string& groups_file, const std::string& mount);

}  // namespace ktqueue
