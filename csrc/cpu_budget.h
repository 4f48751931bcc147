// How many CPUs this process may use. Knows nothing of what they are for.
#pragma once

#include <cstddef>

namespace ktqueue {

// CPUs in the affinity mask, lowered to the cgroup's CPU quota (version 1 or 2), rounded up; at least 1.
size_t default_threads();

}  // namespace ktqueue
