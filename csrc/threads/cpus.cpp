#include "threads/cpus.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <thread>
#include <tuple>

namespace ktqueue {

namespace {

constexpr size_t kMaxCpus = 1 << 16;  // limits what a malformed file can ask for
constexpr double kNoLimit = 1e9;

// The text of a small file; empty if it cannot be read. Uses the C library's files, because C++ streams break in a
// process with two C++ runtimes, which can happen beside torch.
std::string read_text(const std::string& path) {
    std::string text;
    if (FILE* file = std::fopen(path.c_str(), "r")) {
        char part[1024];
        for (size_t count; (count = std::fread(part, 1, sizeof(part), file)) > 0;) text.append(part, count);
        std::fclose(file);
    }
    return text;
}

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

std::vector<size_t> parse_cpu_list(const std::string& text) {
    std::vector<size_t> ids;
    for (const char* cursor = text.c_str(); *cursor >= '0' && *cursor <= '9';) {
        char* end = nullptr;
        const size_t first = std::strtoul(cursor, &end, 10);
        size_t last = first;
        if (*end == '-') last = std::strtoul(end + 1, &end, 10);
        for (size_t id = first; id <= last && id < kMaxCpus; ++id) ids.push_back(id);
        if (*end != ',') break;
        cursor = end + 1;
    }
    return ids;
}

std::vector<size_t> allowed_cpus() {
    std::vector<size_t> ids;
    for (size_t size = 1024; size <= kMaxCpus && ids.empty(); size *= 4) {  // the call fails if the mask is too short
        cpu_set_t* set = CPU_ALLOC(size);
        const size_t bytes = CPU_ALLOC_SIZE(size);
        if (set != nullptr && sched_getaffinity(0, bytes, set) == 0)
            for (size_t id = 0; id < size; ++id)
                if (CPU_ISSET_S(id, bytes, set)) ids.push_back(id);
        CPU_FREE(set);
    }
    if (ids.empty())
        for (size_t id = 0; id < std::max(1u, std::thread::hardware_concurrency()); ++id) ids.push_back(id);
    return ids;
}

std::vector<Cpu> read_topology(const std::vector<size_t>& ids, const std::string& root) {
    std::map<size_t, size_t> node_of;
    for (const size_t node : parse_cpu_list(read_text(root + "/node/has_cpu")))
        for (const size_t id : parse_cpu_list(read_text(root + "/node/node" + std::to_string(node) + "/cpulist")))
            node_of[id] = node;
    std::vector<Cpu> cpus;
    for (const size_t id : ids) {
        const std::string folder = root + "/cpu/cpu" + std::to_string(id) + "/topology";
        const std::vector<size_t> siblings = parse_cpu_list(read_text(folder + "/thread_siblings_list"));
        const auto node = node_of.find(id);
        cpus.push_back({id, siblings.empty() ? id : *std::min_element(siblings.begin(), siblings.end()),
                        node == node_of.end() ? 0 : node->second});
    }
    return cpus;
}

size_t count_cores(const std::vector<Cpu>& cpus) {
    std::set<size_t> cores;
    for (const Cpu& cpu : cpus) cores.insert(cpu.core);
    return cores.size();
}

std::vector<Cpu> spread(const std::vector<Cpu>& cpus, size_t count) {
    struct Ranked {
        size_t sibling, turn;  // index among the CPUs of its core; number of CPUs with that index before it in its node
        Cpu cpu;
    };
    std::map<size_t, size_t> seen_of_core;
    std::map<std::pair<size_t, size_t>, size_t> seen_of_node;
    std::vector<Ranked> ranked;
    for (const Cpu& cpu : cpus) {
        const size_t sibling = seen_of_core[cpu.core]++;
        ranked.push_back({sibling, seen_of_node[{cpu.node, sibling}]++, cpu});
    }
    const auto key = [](const Ranked& candidate) {
        return std::make_tuple(candidate.sibling, candidate.turn, candidate.cpu.node);
    };
    std::sort(ranked.begin(), ranked.end(), [&](const Ranked& a, const Ranked& b) { return key(a) < key(b); });
    ranked.resize(count);
    std::stable_sort(ranked.begin(), ranked.end(),
                     [](const Ranked& a, const Ranked& b) { return a.cpu.node < b.cpu.node; });
    std::vector<Cpu> chosen;
    for (const Ranked& candidate : ranked) chosen.push_back(candidate.cpu);
    return chosen;
}

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
