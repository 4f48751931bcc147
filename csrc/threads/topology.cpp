#include "threads/topology.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <thread>
#include <tuple>

#include "threads/text_file.h"

namespace ktqueue {

namespace {

constexpr size_t kMaxCpus = 1 << 16;  // bounds what a strange file can ask for

}  // namespace

std::vector<size_t> parse_cpu_list(const std::string& text) {
    std::vector<size_t> ids;
    for (const char* at = text.c_str(); *at >= '0' && *at <= '9';) {
        char* end = nullptr;
        const size_t first = std::strtoul(at, &end, 10);
        size_t last = first;
        if (*end == '-') last = std::strtoul(end + 1, &end, 10);
        for (size_t id = first; id <= last && id < kMaxCpus; ++id) ids.push_back(id);
        if (*end != ',') break;
        at = end + 1;
    }
    return ids;
}

std::vector<size_t> allowed_cpus() {
    std::vector<size_t> ids;
    for (size_t size = 1024; size <= kMaxCpus && ids.empty(); size *= 4) {  // a mask that is too short is an error
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
        size_t sibling, turn;  // which CPU of its core it is; how many of that sort its node has before it
        Cpu cpu;
    };
    std::map<size_t, size_t> seen_of_core;
    std::map<std::pair<size_t, size_t>, size_t> seen_of_node;
    std::vector<Ranked> ranked;
    for (const Cpu& cpu : cpus) {
        const size_t sibling = seen_of_core[cpu.core]++;
        ranked.push_back({sibling, seen_of_node[{cpu.node, sibling}]++, cpu});
    }
    const auto key = [](const Ranked& one) { return std::make_tuple(one.sibling, one.turn, one.cpu.node); };
    std::sort(ranked.begin(), ranked.end(), [&](const Ranked& a, const Ranked& b) { return key(a) < key(b); });
    ranked.resize(count);
    std::stable_sort(ranked.begin(), ranked.end(),
                     [](const Ranked& a, const Ranked& b) { return a.cpu.node < b.cpu.node; });
    std::vector<Cpu> chosen;
    for (const Ranked& one : ranked) chosen.push_back(one.cpu);
    return chosen;
}

}  // namespace ktqueue
