#include "cpu_budget.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

namespace ktqueue {

namespace {

constexpr double kNoLimit = 1e9;

size_t affinity_cpus() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return static_cast<size_t>(CPU_COUNT(&set));
    return std::max(1u, std::thread::hardware_concurrency());  // more than 1024 CPUs: the mask does not fit
}

// cgroup v2: one file "cpu.max" with "max 100000" or "150000 100000" (microseconds a period).
double quota_v2(const std::string& folder) {
    std::ifstream file(folder + "/cpu.max");
    std::string quota;
    double period = 0;
    if (!(file >> quota >> period) || quota == "max" || period <= 0) return kNoLimit;
    return std::atof(quota.c_str()) / period;
}

// cgroup v1: two files; quota -1 is no limit.
double quota_v1(const std::string& folder) {
    std::ifstream quota_file(folder + "/cpu.cfs_quota_us"), period_file(folder + "/cpu.cfs_period_us");
    double quota = -1, period = 0;
    if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return kNoLimit;
    return quota / period;
}

}  // namespace

double cgroup_cpus(const std::string& groups_file, const std::string& mount) {
    double limit = kNoLimit;
    std::ifstream groups(groups_file);
    for (std::string line; std::getline(groups, line);) {  // "0::/path" (v2) or "4:cpu,cpuacct:/path" (v1)
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        std::string controllers = ",";
        controllers.append(line, first + 1, second - first - 1).append(",");
        const bool version2 = controllers == ",,";
        if (!version2 && controllers.find(",cpu,") == std::string::npos) continue;
        std::string path = line.substr(second + 1);
        while (!path.empty() && path.back() == '/') path.pop_back();
        for (;;) {
            limit = std::min(limit, version2 ? quota_v2(mount + path) : quota_v1(mount + "/cpu" + path));
            if (path.empty()) break;
            path.erase(path.rfind('/'));
        }
    }
    return limit;
}

size_t default_threads() {
    const double limit = std::ceil(cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup"));
    const size_t cpus = affinity_cpus();
    return std::max<size_t>(1, limit < static_cast<double>(cpus) ? static_cast<size_t>(limit) : cpus);
}

}  // namespace ktqueue
