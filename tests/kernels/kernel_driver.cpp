// Drives the kernels without Python over random odd shapes, damaged indices and weights, and non-finite numbers, and
// checks the results. Made for sanitizers: all arrays have exactly their required size, or are next to pages without
// access rights, so that any access beyond them is detected. See `make sanitize` and `make fuzz`.
//
// kernel_driver CASES [SECONDS [SEED]]: stops after CASES or SECONDS, whichever comes first. A case that fails prints
// its seed; CASES 1 with that seed runs it again.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "driver/cases.h"
#include "isa/cpu_features.h"
#include "isa/ladder.h"

namespace ktqueue {

#if KTQUEUE_X86
const KernelTable& emulated_kernels();  // needs has_avx512()
#endif

const std::vector<const KernelTable*>& all_kernels() {
    static const std::vector<const KernelTable*> all = [] {
        std::vector<const KernelTable*> tables;
        for (const char* isa : present_kernels()) tables.push_back(&kernels_named(isa));
#if KTQUEUE_X86
        if (has_avx512()) tables.push_back(&emulated_kernels());
#endif
        return tables;
    }();
    return all;
}

}  // namespace ktqueue

using namespace ktqueue;

int main(int count, char** arguments) {
    const auto argument = [&](int i, const char* missing) { return i < count ? arguments[i] : missing; };
    const uint64_t cases = std::strtoull(argument(1, "200"), nullptr, 10);
    const double seconds = std::atof(argument(2, "1e9"));
    const uint64_t first = std::strtoull(argument(3, "1"), nullptr, 10);
    const auto begin = std::chrono::steady_clock::now();
    uint64_t done = 0;
    for (; done < cases; ++done) {
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > seconds) break;
        const uint64_t seed = first + done;
        Random random(seed);
        const KernelTable& kernels = *random.element(all_kernels());
        constexpr void (*kCases[])(Random&, const KernelTable&) = {run_attention, run_linear, run_experts,
                                                                   run_prefetch};
        try {
            random.element(kCases)(random, kernels);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "seed %llu on %s: %s\n", static_cast<unsigned long long>(seed), kernels.isa,
                         error.what());
            return 1;
        }
    }
    std::printf("%llu cases from seed %llu\n", static_cast<unsigned long long>(done),
                static_cast<unsigned long long>(first));
    return 0;
}
