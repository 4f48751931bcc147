// Attention over random steps: odd shapes, damaged indices, non-finite numbers.
#include <algorithm>
#include <limits>

#include "cases.h"
#include "model/indexer.h"
#include "model/paged_attention.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

struct AttentionCase {
    std::vector<int32_t> query_starts{0}, context_lengths, page_table;
    std::vector<int64_t> slot_mapping;
    size_t page_size, pages, max_pages;
    AttentionShape shape;

    explicit AttentionCase(Random& random) {
        const size_t head_dims[] = {8, 16, 40, 64, 128, 256};
        shape.kv_heads = random.number(1, 3);
        shape.heads = shape.kv_heads * random.number(1, 5);
        shape.head_dim = head_dims[random.number(0, 5)];
        page_size = random.number(1, 17);
        const size_t rows = random.number(0, 4);
        std::vector<size_t> used;
        max_pages = random.number(0, 2);
        for (size_t row = 0; row < rows; ++row) {
            const size_t context = random.number(0, 70), fed = random.number(0, std::min<size_t>(context, 20));
            context_lengths.push_back(static_cast<int32_t>(context));
            query_starts.push_back(query_starts.back() + static_cast<int32_t>(fed));
            used.push_back((context + page_size - 1) / page_size);
            max_pages = std::max(max_pages, used.back());
        }
        page_table.assign(rows * max_pages, -1);  // nothing is read beyond a row's pages
        pages = 0;
        for (size_t row = 0; row < rows; ++row) {
            for (size_t i = 0; i < used[row]; ++i) page_table[row * max_pages + i] = static_cast<int32_t>(pages++);
            const auto context = static_cast<size_t>(context_lengths[row]);
            const auto fed = static_cast<size_t>(query_starts[row + 1] - query_starts[row]);
            for (size_t at = context - fed; at < context; ++at) {
                const auto page = static_cast<size_t>(page_table[row * max_pages + at / page_size]);
                slot_mapping.push_back(static_cast<int64_t>(page * page_size + at % page_size));
            }
        }
        pages = std::max<size_t>(1, pages);
    }

    void damage(Random& random) {
        std::vector<int32_t>* arrays[] = {&query_starts, &context_lengths, &page_table};
        const size_t which = random.number(0, 5);
        if (which < 3 && !arrays[which]->empty())
            random.element(*arrays[which]) = static_cast<int32_t>(random.any_integer());
        if (which == 3 && !slot_mapping.empty()) random.element(slot_mapping) = random.any_integer();
        if (which == 4) shape.head_dim = random.number(0, 2000);
        if (which == 5) shape.heads = random.number(0, 9);
    }

    PagedStep step() const {
        return {query_starts.data(),
                context_lengths.data(),
                page_table.data(),
                slot_mapping.data(),
                slot_mapping.size(),
                context_lengths.size(),
                max_pages,
                pages,
                page_size};
    }
};

// The choices of an indexer with random queries and keys, which must be in order and of the row.
std::vector<int32_t> choose(Random& random, const PagedStep& step, const AttentionPlan& plan,
                            const KernelTable& kernels) {
    Indexer indexer;
    indexer.heads = random.number(1, 9);
    indexer.columns = 8 * random.number(1, 5);
    const std::vector<float> query = random.floats(plan.queries.size() * indexer.heads * indexer.columns);
    const std::vector<float> weights = random.floats(plan.queries.size() * indexer.heads);
    const std::vector<float> keys = random.floats(step.pages * step.page_size * indexer.columns);
    std::vector<int32_t> slots(step.tokens * plan.chosen, -1);
    std::vector<float> scores;
    choose_keys(step, plan, indexer, {query.data(), weights.data(), keys.data(), slots.data()}, kernels, scores);
    for (const Query& q : plan.queries) {
        if (!plan.chooses(q)) continue;
        size_t position = 0;
        for (size_t i = 0; i < plan.chosen; ++i, ++position) {
            const auto slot = static_cast<size_t>(slots[q.token * plan.chosen + i]);
            const auto slot_of = [&](size_t at) {
                const int32_t page = step.page_table[q.row * step.max_pages + at / step.page_size];
                return static_cast<size_t>(page) * step.page_size + at % step.page_size;
            };
            while (position < q.seen && slot_of(position) != slot) ++position;
            require(position < q.seen, "an indexer chose a key that its token does not see, or one twice");
        }
    }
    return slots;
}

}  // namespace

void run_attention(Random& random, const KernelTable& kernels) {
    AttentionCase attention(random);
    if (random.chance(3)) attention.damage(random);
    const PagedStep step = attention.step();
    const AttentionShape& shape = attention.shape;
    try {
        check(step);
        check(shape);
    } catch (const std::invalid_argument&) {
        return;
    }
    const size_t tokens = step.tokens, dim = shape.head_dim;
    std::vector<int64_t> wanted;
    for (size_t t = 0; t < tokens; ++t)
        if (random.chance(2)) wanted.push_back(static_cast<int64_t>(t));
    const bool all = wanted.empty() || random.chance(2);  // a null pointer means all of them
    const size_t queries = all ? tokens : wanted.size();
    const bool chooses = shape.kv_heads == 1 && random.chance(2);
    AttentionPlan plan;
    plan_attention(step, shape, all ? nullptr : wanted.data(), queries, plan, chooses ? random.number(1, 40) : 0);

    const std::vector<float> key = random.floats(shape.kv_heads * tokens * dim);
    const std::vector<float> value = random.floats(shape.kv_heads * tokens * dim);
    const std::vector<float> query = random.floats(shape.heads * queries * dim);
    std::vector<float> keys = random.floats(step.pages * step.page_size * shape.kv_heads * dim);
    std::vector<float> values = random.floats(keys.size());
    const bool head_first = random.chance(2);  // [heads, tokens, dim] or [tokens, heads, dim]
    const size_t kv_head = head_first ? tokens * dim : dim, kv_token = head_first ? dim : shape.kv_heads * dim;
    write_cache(step, shape,
                {key.data(), value.data(), kv_head, kv_token, kv_head, kv_token, keys.data(), values.data()});

    const std::vector<int32_t> choice = chooses ? choose(random, step, plan, kernels) : std::vector<int32_t>();
    const size_t window = random.chance(2) || chooses ? 0 : random.number(1, 40);
    const size_t chunk = random.chance(2) || chooses ? 0 : random.number(1, 40);
    std::vector<float> outputs[2];
    for (const size_t threads : {3, 1}) {
        set_shared_pool(threads, 20, Pin::off);
        std::vector<float>& output = outputs[threads == 1];
        output.assign(queries * shape.heads * dim, std::numeric_limits<float>::quiet_NaN());
        attend(step, shape, plan,
               {
                   .query = query.data(),
                   .query_head_stride = head_first ? queries * dim : dim,
                   .query_token_stride = head_first ? dim : shape.heads * dim,
                   .cache_keys = keys.data(),
                   .cache_values = chooses ? keys.data() : values.data(),
                   .scaling = 1.0f / std::sqrt(static_cast<float>(dim)),
                   .score_cap = 0,
                   .sliding_window = window,
                   .chunk = chunk,
                   .sinks = nullptr,
                   .output = output.data(),
                   .choice = choice.data(),
               },
               kernels);
    }
    if (!outputs[0].empty() && std::memcmp(outputs[0].data(), outputs[1].data(), 4 * outputs[0].size()) != 0)
        throw std::runtime_error("attention depends on the number of threads");
}

}  // namespace ktqueue
