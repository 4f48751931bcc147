#include "model/linear_attention.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

constexpr size_t kChannelsAtOnce = 256;

void require(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(std::string(what) + " does not fit the linear attention");
}

bool fits(const Linear* linear, size_t rows, size_t columns) {
    return linear && linear->rows() == rows && linear->columns() == columns;
}

// The first token of a row in the packed batch, their number, and whether the row has tokens before.
struct Row {
    size_t first, tokens;
    bool continues;

    Row(const PagedStep& step, size_t row)
        : first(static_cast<size_t>(step.query_starts[row])),
          tokens(static_cast<size_t>(step.query_starts[row + 1]) - first),
          continues(static_cast<size_t>(step.context_lengths[row]) > tokens) {}
};

}  // namespace

void check(const LinearAttention& layer, size_t hidden) {
    const LinearAttentionShape& shape = layer.shape;
    const auto allowed = [](size_t dim) { return dim > 0 && dim % 8 == 0 && dim <= kMaxDeltaDim; };
    if (!allowed(shape.key_dim) || !allowed(shape.value_dim))
        throw std::invalid_argument("heads of linear attention must have a multiple of 8 dimensions, at most " +
                                    std::to_string(kMaxDeltaDim) + ", got " + std::to_string(shape.key_dim) + " and " +
                                    std::to_string(shape.value_dim));
    if (shape.taps < 1 || shape.taps > kMaxTaps)
        throw std::invalid_argument("the convolution must be over 1 to " + std::to_string(kMaxTaps) + " tokens, got " +
                                    std::to_string(shape.taps));
    require(shape.key_heads > 0 && shape.value_heads > 0 && shape.value_heads % shape.key_heads == 0,
            "the number of heads");
    require(fits(layer.qkv, shape.channels(), hidden), "qkv");
    require(fits(layer.gate, shape.values(), hidden), "the gate");
    require(fits(layer.decay, shape.value_heads, hidden), "the decay");
    require(fits(layer.rate, shape.value_heads, hidden), "the rate");
    require(layer.convolution.size() == shape.taps * shape.channels(), "the convolution");
    require(layer.decay_rates.size() == shape.value_heads && layer.decay_biases.size() == shape.value_heads,
            "the vector of decays");
    require(layer.norm.size() == shape.value_dim, "the norm");
}

void check(const StateStep& states, size_t rows) {
    for (size_t row = 0; row < rows; ++row)
        for (const auto& [name, slots] :
             {std::pair{"state_sources", states.sources}, {"state_targets", states.targets}})
            if (slots[row] < 0 || static_cast<size_t>(slots[row]) >= states.slots)
                throw std::invalid_argument(std::string(name) + "[" + std::to_string(row) + "] must be from 0 to " +
                                            std::to_string(static_cast<int64_t>(states.slots) - 1) + ", got " +
                                            std::to_string(slots[row]));
    std::vector<int32_t> writers(states.slots, -1);
    for (size_t row = 0; row < rows; ++row) {
        int32_t& writer = writers[static_cast<size_t>(states.targets[row])];
        if (writer >= 0)
            throw std::invalid_argument("rows " + std::to_string(writer) + " and " + std::to_string(row) +
                                        " write the same state");
        writer = static_cast<int32_t>(row);
    }
    for (size_t row = 0; row < rows; ++row) {
        const int32_t writer = writers[static_cast<size_t>(states.sources[row])];
        if (writer >= 0 && writer != static_cast<int32_t>(row) && !states.continues(row))
            throw std::invalid_argument("row " + std::to_string(row) + " reads the state that row " +
                                        std::to_string(writer) + " writes");
    }
}

void attend(const PagedStep& step, const StateStep& slots, const LinearAttention& layer,
            const LinearAttentionCall& call, const KernelTable& kernels) {
    const LinearAttentionShape& shape = layer.shape;
    const size_t channels = shape.channels(), values = shape.values(), heads = shape.value_heads;
    const size_t recent_size = (shape.taps - 1) * channels, head_size = shape.key_dim * shape.value_dim;
    const auto pool = shared_pool();
    const size_t blocks = (channels + kChannelsAtOnce - 1) / kChannelsAtOnce;
    // Rows that continue one another are a task's loop: each reads the state that the one before has written.
    const auto for_chain = [&](size_t row, const auto& compute) {
        if (slots.continues(row)) return;
        do {
            compute(Row(step, row), static_cast<size_t>(slots.sources[row]), static_cast<size_t>(slots.targets[row]));
        } while (++row < step.rows && slots.continues(row));
    };
    pool->for_each(step.rows * blocks, [&](size_t task) {
        const size_t first = task % blocks * kChannelsAtOnce;
        for_chain(task / blocks, [&](const Row& row, size_t source, size_t target) {
            kernels.convolve({
                .x = call.qkv + row.first * channels + first,
                .stride = channels,
                .tokens = row.tokens,
                .channels = std::min(kChannelsAtOnce, channels - first),
                .width = channels,
                .taps = shape.taps,
                .weights = layer.convolution.data() + first,
                .source = row.continues ? call.recent + source * recent_size + first : nullptr,
                .target = call.recent + target * recent_size + first,
            });
        });
    });
    pool->for_each(step.rows * heads, [&](size_t task) {
        const size_t head = task % heads, key_head = shape.key_head(head);
        for_chain(task / heads, [&](const Row& row, size_t source, size_t target) {
            const size_t place = row.first * values + head * shape.value_dim;
            kernels.delta_rule({
                .x = call.qkv + row.first * channels,
                .stride = channels,
                .tokens = row.tokens,
                .query_offset = key_head * shape.key_dim,
                .key_offset = shape.keys() + key_head * shape.key_dim,
                .value_offset = 2 * shape.keys() + head * shape.value_dim,
                .decay = call.decay + row.first * heads + head,
                .rate = call.rate + row.first * heads + head,
                .heads = heads,
                .decay_rate = layer.decay_rates[head],
                .decay_bias = layer.decay_biases[head],
                .epsilon = call.epsilon,
                .key_dim = shape.key_dim,
                .value_dim = shape.value_dim,
                .source = row.continues ? call.states + (source * heads + head) * head_size : nullptr,
                .target = call.states + (target * heads + head) * head_size,
                .norm = layer.norm.data(),
                .gate = call.gate + place,
                .output = call.output + place,
                .output_stride = values,
            });
        });
    });
}

}  // namespace ktqueue
