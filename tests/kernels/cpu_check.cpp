// Prints how the kernels see a machine that a test describes in files. Built and run by test_threads.py.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "threads/cpus.h"
#include "threads/thread_placement.h"

using namespace ktqueue;

// quota GROUPS MOUNT: the cgroup's CPUs
// spread SYSFS CPUS COUNT: "id/core/node" of each CPU chosen, in order
// place SYSFS CPUS QUOTA THREADS PIN: "cpu/node" of each thread; CPU -1 is any
int main(int count, char** arguments) try {
    const std::string verb = count > 1 ? arguments[1] : "";
    if (verb == "quota" && count == 4) {
        std::printf("%g\n", cgroup_cpus(arguments[2], arguments[3]));
    } else if (verb == "spread" && count == 5) {
        const std::vector<Cpu> cpus = read_topology(parse_cpu_list(arguments[3]), arguments[2]);
        for (const Cpu& cpu : spread(cpus, std::strtoul(arguments[4], nullptr, 10)))
            std::printf("%zu/%zu/%zu ", cpu.id, cpu.core, cpu.node);
    } else if (verb == "place" && count == 7) {
        const Machine machine = {read_topology(parse_cpu_list(arguments[3]), arguments[2]), std::atof(arguments[4])};
        for (const Place& place :
             place_threads(std::strtoul(arguments[5], nullptr, 10), parse_pin(arguments[6]), machine))
            std::printf("%d/%zu ", place.cpu, place.node);
    } else {
        return 2;
    }
    return 0;
} catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
