#include "probe/machine_probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr const char* kArithmeticNames[kArithmeticCount] = {"int8", "bf16", "fp32"};

std::vector<const ProbeTable*> all_probes() {
    return {
        &scalar_probes(),
#if defined(__x86_64__)
        &avx2_probes(),   &avxvnni_probes(), &avx512_probes(), &amx_probes(),
#endif
    };
}

ReadLoop widest_read() {
    ReadLoop read = nullptr;
    for (const ProbeTable* probes : available_probes())
        if (probes->read) read = probes->read;
    return read;
}

const ProbeTable& probes_named(const std::string& isa) {
    std::string known;
    for (const ProbeTable* probes : all_probes()) {
        if (isa == probes->isa) {
            if (probes->available()) return *probes;
            throw std::invalid_argument("this CPU has no " + isa);
        }
        known += (known.empty() ? "" : ", ") + std::string(probes->isa);
    }
    throw std::invalid_argument("isa must be one of " + known + ", got '" + isa + "'");
}

size_t check_threads(size_t threads, size_t limit) {
    if (threads > limit)
        throw std::invalid_argument("threads must be at most the pool's " + std::to_string(limit) + ", got " +
                                    std::to_string(threads));
    return threads == 0 ? limit : threads;
}

void check_positive(size_t value, const char* name) {
    if (value == 0) throw std::invalid_argument(std::string(name) + " must be at least 1");
}

// Runs body(0 .. tasks-1) on the pool and returns the seconds it took.
template <class Body>
double timed(ThreadPool& pool, size_t tasks, Body body) {
    const auto begin = std::chrono::steady_clock::now();
    pool.for_each(tasks, std::move(body));
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

std::vector<const ProbeTable*> available_probes() {
    std::vector<const ProbeTable*> found = all_probes();
    std::erase_if(found, [](const ProbeTable* probes) { return !probes->available(); });
    return found;
}

ReadProbe::ReadProbe(size_t size) {
    check_positive(size, "size");
    const auto pool = shared_pool();
    const size_t step = kHugePage * pool->threads();
    if (size > std::numeric_limits<size_t>::max() / 2) throw std::bad_alloc();
    bytes_ = (size + step - 1) / step * step;
    mapping_bytes_ = bytes_ + kHugePage;
    mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping_ == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<char*>(mapping_) + (kHugePage - reinterpret_cast<uintptr_t>(mapping_) % kHugePage) % kHugePage;
    madvise(data_, bytes_, MADV_HUGEPAGE);  // optional: small pages only cost speed
    const size_t share = bytes_ / pool->threads();
    pool->for_each(pool->threads(), [&](size_t thread) { std::memset(data_ + thread * share, 1, share); });
}

ReadProbe::~ReadProbe() {
    munmap(mapping_, mapping_bytes_);
}

double ReadProbe::measure(size_t size, size_t threads, size_t rounds, size_t repeats, size_t prefetch) const {
    const auto pool = shared_pool();
    threads = check_threads(threads, pool->threads());
    check_positive(rounds, "rounds");
    check_positive(repeats, "repeats");
    const ReadLoop read = widest_read();
    if (size > bytes_)
        throw std::invalid_argument("size must be at most the probe's " + std::to_string(bytes_) + " bytes, got " +
                                    std::to_string(size));
    const size_t share = (size == 0 ? bytes_ : size) / threads / kReadStep * kReadStep;
    check_positive(share, "size a thread, in whole steps of 512 bytes,");
    double best = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < repeats; ++i)
        best = std::min(best, timed(*pool, threads, [&](size_t thread) {
                            for (size_t round = 0; round < rounds; ++round) {
                                const uint64_t digest = read(data_ + thread * share, share, prefetch);
                                asm volatile("" : : "r"(digest) : "memory");
                            }
                        }));
    return static_cast<double>(share * threads * rounds) / best;
}

double measure_peak(const std::string& isa, Arithmetic arithmetic, size_t threads, double seconds, size_t repeats) {
    const ProbeTable& probes = probes_named(isa);
    const PeakLoop& loop = probes.peaks[static_cast<size_t>(arithmetic)];
    if (!loop.run) throw std::invalid_argument(isa + " has no " + arithmetic_name(arithmetic) + " arithmetic");
    const auto pool = shared_pool();
    threads = check_threads(threads, pool->threads());
    check_positive(repeats, "repeats");
    if (!(seconds > 0 && seconds <= 10)) throw std::invalid_argument("seconds must be above 0 and at most 10");
    size_t rounds = 256;
    const auto run = [&] { return timed(*pool, threads, [&](size_t) { loop.run(rounds); }); };
    run();  // warms up the threads and the wide units
    double taken = run();
    while (taken < seconds / 2) {  // grows at most 64 times per turn, in case the first run was disturbed
        rounds = static_cast<size_t>(static_cast<double>(rounds) * std::clamp(seconds / taken, 1.5, 64.0));
        taken = run();
    }
    for (size_t i = 1; i < repeats; ++i) taken = std::min(taken, run());
    return loop.operations * static_cast<double>(rounds) * static_cast<double>(threads) / taken;
}

Arithmetic parse_arithmetic(const std::string& name) {
    for (size_t i = 0; i < kArithmeticCount; ++i)
        if (name == kArithmeticNames[i]) return static_cast<Arithmetic>(i);
    throw std::invalid_argument("arithmetic must be int8, bf16 or fp32, got '" + name + "'");
}

const char* arithmetic_name(Arithmetic arithmetic) {
    return kArithmeticNames[static_cast<size_t>(arithmetic)];
}

}  // namespace ktqueue
