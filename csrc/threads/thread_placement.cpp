#include "threads/thread_placement.h"

#include <algorithm>
#include <stdexcept>

#include "threads/cpus.h"

namespace ktqueue {

namespace {

constexpr size_t kFewestPinned = 4;

bool have_the_machine(size_t threads, const Machine& machine) {
    const size_t cpus = machine.cpus.size();
    return threads >= kFewestPinned && threads <= cpus && 2 * threads > count_cores(machine.cpus) &&
           machine.quota >= static_cast<double>(cpus);
}

}  // namespace

Pin parse_pin(const std::string& text) {
    if (text == "auto") return Pin::automatic;
    if (text == "on") return Pin::on;
    if (text == "off") return Pin::off;
    throw std::invalid_argument("pin must be auto, on or off, got '" + text + "'");
}

Machine this_machine() {
    return {read_topology(allowed_cpus()), cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup")};
}

std::vector<Place> place_threads(size_t threads, Pin pin, const Machine& machine, size_t pretend_nodes) {
    std::vector<Place> places(threads, {kAnyCpu, 0});
    if (pretend_nodes > 0) {
        for (size_t i = 0; i < threads; ++i) places[i].node = i * std::min(pretend_nodes, threads) / threads;
        return places;
    }
    if (pin == Pin::off || (pin == Pin::automatic && !have_the_machine(threads, machine))) return places;
    const std::vector<Cpu> chosen = spread(machine.cpus, std::min(threads, machine.cpus.size()));
    // Threads that share a CPU are neighbours. Whole rounds over the CPUs would break the rising order of the nodes.
    size_t node = 0;
    for (size_t i = 0; i < threads; ++i) {
        const size_t index = i * chosen.size() / threads;
        if (index > 0 && i > 0 && chosen[index].node != chosen[(i - 1) * chosen.size() / threads].node) ++node;
        places[i] = {i == 0 ? kAnyCpu : static_cast<int>(chosen[index].id), node};
    }
    return places;
}

}  // namespace ktqueue
