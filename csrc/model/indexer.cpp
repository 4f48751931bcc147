#include "model/indexer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>

#include "model/rms_norm.h"
#include "model/rotary.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

constexpr size_t kQueriesAtOnce = 8;       // of a task: they share the keys that it reads
constexpr size_t kKeysAtOnce = 512;        // of a task
constexpr size_t kScoresAtOnce = 1 << 24;  // limits the buffer, unless one block needs more

// Adjacent queries of one row that choose, with room for `width` scores each from `offset` on.
struct Block {
    size_t first, last, width, offset;
};

void require(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(std::string(what) + " does not fit the indexer");
}

bool fits(const Linear* linear, size_t rows, size_t columns) {
    return linear && linear->rows() == rows && linear->columns() == columns;
}

// A whole number that is larger for a better score. NaN is the best, as for torch.topk.
uint32_t rank_of(float score) {
    const auto bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes 0
    if (std::isnan(score)) return ~uint32_t{0};
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The wanted-th largest of `ranks`. A histogram of their first bits leaves few to be sorted.
uint32_t nth_largest(const std::vector<uint32_t>& ranks, size_t wanted) {
    constexpr int kShift = 21;
    std::array<uint32_t, 1 << (32 - kShift)> counts{};
    for (const uint32_t rank : ranks) ++counts[rank >> kShift];
    size_t bin = counts.size() - 1;
    for (; counts[bin] < wanted; --bin) wanted -= counts[bin];
    thread_local std::vector<uint32_t> candidates;
    candidates.clear();
    for (const uint32_t rank : ranks)
        if (rank >> kShift == bin) candidates.push_back(rank);
    const auto nth = candidates.begin() + static_cast<std::ptrdiff_t>(wanted) - 1;
    std::nth_element(candidates.begin(), nth, candidates.end(), std::greater<>());
    return *nth;
}

// Writes the slots of the best `chosen` of scores[seen], in order of position. `pages`: of the row.
void choose_best(const float* scores, size_t seen, size_t chosen, const int32_t* pages, size_t page_size,
                 int32_t* slots) {
    thread_local std::vector<uint32_t> ranks;
    ranks.resize(seen);
    std::transform(scores, scores + seen, ranks.begin(), rank_of);
    const uint32_t least = nth_largest(ranks, chosen);
    const auto better = std::count_if(ranks.begin(), ranks.end(), [&](uint32_t rank) { return rank > least; });
    size_t equal = chosen - static_cast<size_t>(better);  // of these, the first are chosen
    for (size_t position = 0; position < seen; ++position) {
        if (ranks[position] < least || (ranks[position] == least && equal == 0)) continue;
        if (ranks[position] == least) --equal;
        *slots++ =
            pages[position / page_size] * static_cast<int32_t>(page_size) + static_cast<int32_t>(position % page_size);
    }
}

void choose_in_blocks(const PagedStep& step, const AttentionPlan& plan, const Indexer& indexer, const ChoiceCall& call,
                      const KernelTable& kernels, const std::vector<Block>& blocks, float* scores) {
    struct Task {
        const Block* block;
        size_t first_key;
    };
    std::vector<Task> tasks;
    for (const Block& block : blocks)
        for (size_t key = 0; key < block.width; key += kKeysAtOnce) tasks.push_back({&block, key});
    const auto pages_of = [&](const Query& query) { return step.page_table + query.row * step.max_pages; };
    const auto pool = shared_pool();
    pool->for_each(tasks.size(), [&](size_t i) {
        const auto [block, first_key] = tasks[i];
        kernels.index_scores({
            .query = call.query + block->first * indexer.heads * indexer.columns,
            .weights = call.weights + block->first * indexer.heads,
            .tokens = block->last - block->first,
            .heads = indexer.heads,
            .key_dim = indexer.columns,
            .keys = call.keys,
            .pages = pages_of(plan.queries[block->first]),
            .page_size = step.page_size,
            .first = first_key,
            .last = std::min(first_key + kKeysAtOnce, block->width),
            .out = scores + block->offset + first_key,
            .out_stride = block->width,
        });
    });
    pool->for_each(blocks.size() * kQueriesAtOnce, [&](size_t i) {
        const Block& block = blocks[i / kQueriesAtOnce];
        const size_t place = i % kQueriesAtOnce;
        if (block.first + place >= block.last) return;
        const Query& query = plan.queries[block.first + place];
        choose_best(scores + block.offset + place * block.width, query.seen, plan.chosen, pages_of(query),
                    step.page_size, call.slots + query.token * plan.chosen);
    });
}

}  // namespace

void check(const Indexer& indexer, size_t hidden, size_t rank, size_t rotary) {
    const auto [heads, columns] = std::array{indexer.heads, indexer.columns};
    require(heads > 0 && columns > 0 && columns % 8 == 0 && rotary <= columns && rank > 0, "a size");
    require(fits(indexer.query, heads * columns, rank), "the query");
    require(fits(indexer.key, columns, hidden), "the key");
    require(fits(indexer.weights, heads, hidden), "the matrix of weights");
    require(indexer.norm.size() == 2 * columns, "the norm of the key");
}

void finish_key(const Indexer& indexer, const float* cosine, const float* sine, size_t half, float* key) {
    const float* norm = indexer.norm.data();
    layer_norm(key, norm, norm + indexer.columns, indexer.columns, indexer.epsilon, key);
    rotate(key, cosine, sine, half);
}

void finish_query(const Indexer& indexer, const float* cosine, const float* sine, size_t half, float* query,
                  float* weights) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(indexer.heads * indexer.columns));
    for (size_t head = 0; head < indexer.heads; ++head) {
        rotate(query + head * indexer.columns, cosine, sine, half);
        weights[head] *= scale;
    }
}

void choose_keys(const PagedStep& step, const AttentionPlan& plan, const Indexer& indexer, const ChoiceCall& call,
                 const KernelTable& kernels, std::vector<float>& scores) {
    std::vector<Block> blocks;
    size_t numbers = 0;
    const auto finish_blocks = [&] {
        if (scores.size() < numbers) scores.resize(numbers);
        choose_in_blocks(step, plan, indexer, call, kernels, blocks, scores.data());
        blocks.clear();
        numbers = 0;
    };
    for (size_t first = 0; first < plan.queries.size();) {
        const Query& query = plan.queries[first];
        size_t last = first + 1;
        if (plan.chooses(query)) {
            while (last < plan.queries.size() && last - first < kQueriesAtOnce && plan.queries[last].row == query.row)
                ++last;
            const size_t width = plan.queries[last - 1].seen;  // the most, since queries of a row are in order
            if (!blocks.empty() && numbers + (last - first) * width > kScoresAtOnce) finish_blocks();
            blocks.push_back({first, last, width, numbers});
            numbers += (last - first) * width;
        }
        first = last;
    }
    if (!blocks.empty()) finish_blocks();
}

}  // namespace ktqueue
