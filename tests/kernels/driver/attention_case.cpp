// Attention over random steps: odd shapes, damaged indices, non-finite numbers.
#include <algorithm>
#include <limits>

#include "cases.h"
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
    AttentionPlan plan;
    plan_attention(step, shape, all ? nullptr : wanted.data(), queries, plan);

    const std::vector<float> key = random.floats(shape.kv_heads * tokens * dim);
    const std::vector<float> value = random.floats(shape.kv_heads * tokens * dim);
    const std::vector<float> query = random.floats(shape.heads * queries * dim);
    std::vector<float> keys = random.floats(step.pages * step.page_size * shape.kv_heads * dim);
    std::vector<float> values = random.floats(keys.size());
    const bool head_first = random.chance(2);  // [heads, tokens, dim] or [tokens, heads, dim]
    const size_t kv_head = head_first ? tokens * dim : dim, kv_token = head_first ? dim : shape.kv_heads * dim;
    write_cache(step, shape,
                {key.data(), value.data(), kv_head, kv_token, kv_head, kv_token, keys.data(), values.data()});

    const size_t window = random.chance(2) ? 0 : random.number(1, 40);
    std::vector<float> outputs[2];
    for (const size_t threads : {3, 1}) {
        set_shared_pool(threads, 20, Pin::off);
        std::vector<float>& output = outputs[threads == 1];
        output.assign(queries * shape.heads * dim, std::numeric_limits<float>::quiet_NaN());
        attend(step, shape, plan,
               {query.data(), head_first ? queries * dim : dim, head_first ? dim : shape.heads * dim, keys.data(),
                values.data(), 1.0f / std::sqrt(static_cast<float>(dim)), window, nullptr, output.data()},
               kernels);
    }
    if (!outputs[0].empty() && std::memcmp(outputs[0].data(), outputs[1].data(), 4 * outputs[0].size()) != 0)
        throw std::runtime_error("attention depends on the number of threads");
}

}  // namespace ktqueue
