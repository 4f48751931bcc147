#include "threads/cpu_budget.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "threads/text_file.h"
#include "threads/topology.h"

namespace ktqueue {

namespace {

constexpr double kNoLimit = 1e9;

// cgroup v2: one file "cpu.max" with "max 100000" or "150000 100000" (microseconds a period).
double quota_v2(const std::string& folder) {
    double quota = 0, period = 0;
    const std::string text = read_text(folder + "/cpu.max");
    if (std::sscanf(text.c_str(), "%lf %lf", &quota, &period) != 2 || period <= 0) return kNoLimit;
    return quota / period;
}

// cgroup v1: two files; quota -1 is no limit.
double quota_v1(const std::string& folder) {
    const double quota = std::atof(read_text(folder + "/cpu.cfs_quota_us").c_str());
    const double period = std::atof(read_text(folder + "/cpu.cfs_period_us").c_str());
    return quota <= 0 || period <= 0 ? kNoLimit : quota / period;
}

}  // namespace

double cgroup_cpus(const std::string& groups_file, const std::string& mount) {
    double limit = kNoLimit;
    const std::string groups = read_text(groups_file);
    for (size_t start = 0, end; start < groups.size(); start = end + 1) {
        end = std::min(groups.find('\n', start), groups.size());
        const std::string line = groups.substr(start, end - start);  // "0::/path" (v2) or "4:cpu,cpuacct:/path" (v1)
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
    const size_t cores = count_cores(read_topology(allowed_cpus()));
    return std::max<size_t>(1, limit < static_cast<double>(cores) ? static_cast<size_t>(limit) : cores);
}

}  // namespace ktqueue
