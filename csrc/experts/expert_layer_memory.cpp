// Where the weights of single experts are in memory, and how they are fetched into the caches before use.
#include <stdexcept>
#include <string>

#include "experts/expert_layer.h"
#include "formats/aligned_buffer.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

constexpr size_t kFetchedAtOnce = 2048;  // bytes that a thread fetches between two calls of stop()

}  // namespace

std::vector<std::span<const uint8_t>> ExpertLayer::ranges(size_t expert) const {
    if (expert >= experts())
        throw std::invalid_argument("expert must be from 0 to " + std::to_string(experts() - 1) + ", got " +
                                    std::to_string(expert));
    std::vector<std::span<const uint8_t>> found;
    for (const ExpertPanels* stack : {&gate_up_panels_, &down_panels_})
        for (size_t p = 0; p < stack->panels(); ++p) {
            const std::span<const uint8_t> panel = stack->range(expert, p, p + 1);
            if (!found.empty() && found.back().data() + found.back().size() == panel.data())
                found.back() = {found.back().data(), found.back().size() + panel.size()};
            else
                found.push_back(panel);
        }
    return found;
}

// Calls fetch(thread, line) for each cache line that prefetch() fetches, so that tests can check the order. Each thread
// walks its share of forward()'s tasks in the order in which it will read them.
template <class Fetch>
void ExpertLayer::walk(ThreadPool& pool, std::span<const size_t> experts, size_t most_bytes,
                       const std::function<bool()>& stop, const Fetch& fetch) const {
    const Jobs both = jobs(pool, experts.size(), false);
    pool.for_each(pool.threads(), [&](size_t thread) {
        size_t left = most_bytes / kFetchedAtOnce * kFetchedAtOnce;
        for (const PanelJob* job : {&both.gate_up, &both.down}) {
            const auto [begin, end] = pool.thread_range(thread, job->tasks());
            for (size_t task = begin; task < end; ++task) {
                const auto [span, first, last] = job->block(task);
                const std::span<const uint8_t> block = job->panels.range(experts[span], first, last);
                for (size_t offset = 0; offset < block.size(); offset += kCacheLine, left -= kCacheLine) {
                    if (left % kFetchedAtOnce == 0 && (left == 0 || stop())) return;
                    fetch(thread, block.data() + offset);
                }
            }
        }
    });
}

void ExpertLayer::prefetch(std::span<const size_t> experts, size_t most_bytes,
                           const std::function<bool()>& stop) const {
    walk(*shared_pool(), experts, most_bytes, stop,
         [](size_t, const uint8_t* line) { __builtin_prefetch(line, 0, 2); });
}

std::vector<std::vector<const uint8_t*>> ExpertLayer::prefetch_lines(std::span<const size_t> experts, size_t most_bytes,
                                                                     const std::function<bool()>& stop) const {
    const std::shared_ptr<ThreadPool> pool = shared_pool();
    std::vector<std::vector<const uint8_t*>> lines(pool->threads());
    walk(*pool, experts, most_bytes, stop, [&](size_t thread, const uint8_t* line) { lines[thread].push_back(line); });
    return lines;
}

}  // namespace ktqueue
