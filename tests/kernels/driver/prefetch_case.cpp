// The lines that an expert layer prefetches, compared with the lines that its kernels then read: by which thread, in
// which order. The kernels here record their tasks instead of multiplying.
#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "cases.h"
#include "experts/expert_layer.h"
#include "formats/aligned_buffer.h"
#include "matrices.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

using Lines = std::vector<uintptr_t>;  // addresses of cache lines, in the order in which they are read

void append(Lines& lines, const uint8_t* data, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kCacheLine) lines.push_back(reinterpret_cast<uintptr_t>(data) + at);
}

// What forward() makes each thread read: first of gate and up, then of down.
struct Notes {
    size_t threads, intermediate;
    std::atomic<size_t> begun[2] = {};
    std::mutex mutex;
    std::map<std::thread::id, Lines[2]> lines;
};

Notes* notes = nullptr;  // of the running case

// A thread waits in its first task until all threads have begun. So each begins with a task of its own, and steals only
// when its own tasks are done.
void note(const PanelTask& task) {
    for (size_t t = 0; t < task.tokens; ++t) std::fill_n(task.y + t * task.y_stride, 16 * task.panels, 0.0f);
    const size_t down = task.columns == notes->intermediate;
    bool first;
    {
        std::lock_guard lock(notes->mutex);
        Lines& mine = notes->lines[std::this_thread::get_id()][down];
        first = mine.empty();
        append(mine, task.weights, task.panels * task.panel_stride);
    }
    if (first) ++notes->begun[down];
    while (notes->begun[down] < notes->threads) std::this_thread::yield();
}

KernelTable noting(const KernelTable& kernels) {
    KernelTable table = kernels;
    for (size_t quant = 0; quant < kQuantCount; ++quant) table.dot[quant] = table.exact[quant] = note;
    return table;
}

// What each thread prefetches: of gate and up, then of down. Each line of the experts comes once.
std::vector<std::array<Lines, 2>> walks(const ExpertLayer& layer, const std::vector<size_t>& experts,
                                        size_t mid_bytes) {
    std::multiset<uintptr_t> down, all, fetched;
    for (const size_t expert : experts) {
        Lines lines;
        for (const auto& range : layer.ranges(expert)) append(lines, range.data(), range.size());
        down.insert(lines.begin() + static_cast<ptrdiff_t>(mid_bytes / kCacheLine), lines.end());
        all.insert(lines.begin(), lines.end());
    }
    const auto is_down = [&](uintptr_t line) { return down.contains(line); };
    std::vector<std::array<Lines, 2>> result;
    for (const auto& of_thread : layer.prefetch_lines(experts, SIZE_MAX, [] { return false; })) {
        Lines lines;
        for (const uint8_t* line : of_thread) lines.push_back(reinterpret_cast<uintptr_t>(line));
        const auto middle = std::ranges::find_if(lines, is_down);
        require(std::all_of(middle, lines.end(), is_down), "gate or up is fetched after down");
        result.push_back({Lines(lines.begin(), middle), Lines(middle, lines.end())});
        fetched.insert(lines.begin(), lines.end());
    }
    require(fetched == all, "not each line of the experts is fetched once");
    return result;
}

// Each thread must read what it prefetched, from the front, until another thread has stolen the rest. Then it reads
// what others have left.
void compare(const std::vector<std::array<Lines, 2>>& expected, const Notes& taken) {
    require(taken.lines.size() == expected.size(), "another number of threads computes");
    std::set<size_t> found;
    std::multiset<uintptr_t> fetched, read;
    for (const auto& [id, lines] : taken.lines) {
        const auto same = std::ranges::find_if(expected, [&](const auto& walk) { return walk[0][0] == lines[0][0]; });
        require(same != expected.end(), "a thread begins with what none fetches first");
        const auto thread = static_cast<size_t>(same - expected.begin());
        require(found.insert(thread).second, "two threads begin with the same");
        require((thread == 0) == (id == std::this_thread::get_id()), "a thread fetches for another");
        for (size_t down : {0, 1}) {
            const Lines& mine = (*same)[down];
            const auto [end, rest] = std::ranges::mismatch(mine, lines[down]);
            require(end != mine.begin(), "a thread begins with another part of down than it fetches first");
            const std::set<uintptr_t> own(mine.begin(), mine.end());
            require(std::none_of(rest, lines[down].end(), [&](uintptr_t line) { return own.contains(line); }),
                    "a thread reads in another order than it fetches");
            fetched.insert(mine.begin(), mine.end());
            read.insert(lines[down].begin(), lines[down].end());
        }
    }
    require(fetched == read, "what is fetched is not what is read");
}

}  // namespace

void run_prefetch(Random& random, const KernelTable& kernels) {
    const size_t threads = random.number(1, 4);
    set_shared_pool(threads, 20, Pin::off, random.number(1, threads));
    const std::vector<Quant> three = random_quants(random, 3);
    const size_t count = random.number(1, 5);
    const size_t hidden = random_columns(random, {three[0], three[1]}, 512);
    const size_t intermediate = random_columns(random, {three[2]}, 512);
    if (hidden == intermediate) return;  // kernels are distinguished by their columns
    const auto stored = [&](Quant quant, size_t rows, size_t columns, const std::vector<uint8_t>& zeros) {
        return ExpertMatrices{quant, rows, columns, std::vector<const uint8_t*>(count, zeros.data()), {}};
    };
    const std::vector<uint8_t> zeros(4 * hidden * intermediate);
    const KernelTable table = noting(kernels);
    const ExpertLayer layer(stored(three[0], intermediate, hidden, zeros),
                            stored(three[1], intermediate, hidden, zeros),
                            stored(three[2], hidden, intermediate, zeros), {}, table);
    std::vector<size_t> experts;
    std::vector<int64_t> ids;
    for (size_t expert = 0; expert < count; ++expert)
        if (random.chance(2)) {
            experts.push_back(expert);
            ids.push_back(static_cast<int64_t>(expert));
        }
    const size_t mid_bytes =
        panel_count(intermediate) * (panel_bytes(three[0], hidden) + panel_bytes(three[1], hidden));
    const auto expected = walks(layer, experts, mid_bytes);
    require(expected.size() == threads, "another number of threads fetches");
    // A thread without a task steals the last task of another thread, which may then have none to begin with.
    if (std::ranges::any_of(expected, [](const auto& walk) { return walk[0].empty() || walk[1].empty(); })) return;

    Notes taken{threads, intermediate};
    notes = &taken;
    const std::vector<float> x(hidden), weights(ids.size(), 1.0f);
    std::vector<float> out(hidden);
    layer.forward(x.data(), ids.data(), weights.data(), 1, ids.size(), out.data());
    notes = nullptr;
    compare(expected, taken);
}

}  // namespace ktqueue
