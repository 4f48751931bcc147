// Where the weights of single experts lie, and how they get into the caches before they are used.
#include <stdexcept>
#include <string>

#include "expert_layer.h"
#include "thread_pool.h"

namespace ktqueue {

namespace {

constexpr size_t kFetchedAtOnce = 2048;  // bytes that a thread asks for between two questions whether to stop

}  // namespace

std::vector<std::span<const uint8_t>> ExpertLayer::ranges(size_t expert) const {
    if (expert >= experts())
        throw std::invalid_argument("expert must be from 0 to " + std::to_string(experts() - 1) + ", got " +
                                    std::to_string(expert));
    std::vector<std::span<const uint8_t>> found;
    const auto append = [&](const uint8_t* begin, size_t bytes) {
        if (!found.empty() && found.back().data() + found.back().size() == begin)
            found.back() = {found.back().data(), found.back().size() + bytes};
        else
            found.emplace_back(begin, bytes);
    };
    for (size_t p = 0; p < panel_count(intermediate()); ++p)
        append(gate_up_.data() + mid_slices_.place(expert, p) * (gate_panel_ + up_panel_), gate_panel_ + up_panel_);
    for (size_t p = 0; p < panel_count(hidden()); ++p)
        append(down_arena_.data() + hidden_slices_.place(expert, p) * down_panel_, down_panel_);
    return found;
}

void ExpertLayer::prefetch(std::span<const size_t> experts, size_t most_bytes,
                           const std::function<bool()>& stop) const {
    const std::shared_ptr<ThreadPool> pool = shared_pool();
    const size_t spans = experts.size();
    const TaskPanels step = task_panels(spans, false);
    pool->for_each(pool->threads(), [&](size_t thread) {
        size_t left = most_bytes / kFetchedAtOnce * kFetchedAtOnce;
        const auto fetch = [&](const NodeSlices& slices, size_t panels, const uint8_t* arena, size_t panel) {
            const auto [begin, end] = pool->thread_range(thread, slices.tasks(spans, panels));
            for (size_t task = begin; task < end; ++task) {
                const auto [span, first, last] = slices.block(task, spans, panels);
                const uint8_t* at = arena + slices.place(experts[span], first) * panel;
                for (const uint8_t* const behind = at + (last - first) * panel; at < behind; at += 64, left -= 64) {
                    if (left % kFetchedAtOnce == 0 && (left == 0 || stop())) return;
                    __builtin_prefetch(at, 0, 2);
                }
            }
        };
        fetch(mid_slices_, step.mid, gate_up_.data(), gate_panel_ + up_panel_);
        fetch(hidden_slices_, step.hidden, down_arena_.data(), down_panel_);
    });
}

}  // namespace ktqueue
