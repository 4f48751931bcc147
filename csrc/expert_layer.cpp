#include "expert_layer.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace ktqueue {

namespace {

constexpr size_t kTokensAtOnce = 512;      // bounds the workspace
constexpr size_t kBlockBytes = 64 * 1024;  // of weights in one task: stays in a core's second-level cache
constexpr size_t kMaxBlockRows = 64;
constexpr size_t kTokensPerPass = 32;  // of one expert; bounds the buffers on a task's stack

constexpr size_t round_up(size_t value, size_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

size_t rows_per_block(size_t bytes_per_row) {
    return std::clamp<size_t>(kBlockBytes / bytes_per_row / 8 * 8, 8, kMaxBlockRows);
}

void check(const ExpertMatrices& matrices, const char* name, size_t experts, size_t rows, size_t columns) {
    if (matrices.data.size() != experts || matrices.rows != rows || matrices.columns != columns)
        throw std::invalid_argument(std::string(name) + " must be " + std::to_string(experts) + " matrices of " +
                                    std::to_string(rows) + " x " + std::to_string(columns) + ", got " +
                                    std::to_string(matrices.data.size()) + " of " + std::to_string(matrices.rows) +
                                    " x " + std::to_string(matrices.columns));
}

}  // namespace

// The consecutive sorted pairs of one expert.
struct ExpertLayer::Span {
    size_t expert, begin, end;
};

// A *pair* is a (token, slot). Buffers only grow; `sorted` positions list the pairs expert by expert, in order of pair.
struct ExpertLayer::Workspace {
    std::mutex mutex;
    std::vector<size_t> starts;         // [experts + 1] first position of each expert
    std::vector<size_t> position;       // [pairs] where a pair stands in sorted order
    std::vector<const float*> input;    // [pairs] activations, sorted
    std::vector<const float*> mid_row;  // [pairs] rows of mid, sorted
    std::vector<float> padded;          // [tokens, hidden up to 32], used if hidden is not a multiple of 32
    std::vector<float> mid;             // [pairs, intermediate up to 32], sorted
    std::vector<float> partial;         // [pairs, hidden], sorted
    std::vector<Span> spans;            // experts that have pairs
    size_t mid_stride = 0;
};

ExpertLayer::ExpertLayer(ExpertMatrices gate, ExpertMatrices up, ExpertMatrices down, const KernelTable& kernels)
    : gate_(std::move(gate)), up_(std::move(up)), down_(std::move(down)), kernels_(kernels) {
    if (gate_.data.empty() || gate_.rows == 0)
        throw std::invalid_argument("gate must have at least one expert and one row");
    check(up_, "up", experts(), intermediate(), hidden());
    check(down_, "down", experts(), hidden(), intermediate());
    gate_block_rows_ = rows_per_block(row_bytes(gate_.quant, hidden()) + row_bytes(up_.quant, hidden()));
    down_block_rows_ = rows_per_block(row_bytes(down_.quant, intermediate()));
}

void ExpertLayer::forward(const float* x, const int64_t* ids, const float* weights, size_t tokens, size_t slots,
                          float* out) const {
    for (size_t pair = 0; pair < tokens * slots; ++pair)
        if (ids[pair] < 0 || static_cast<size_t>(ids[pair]) >= experts())
            throw std::invalid_argument("expert id must be from 0 to " + std::to_string(experts() - 1) + ", got " +
                                        std::to_string(ids[pair]) + " for token " + std::to_string(pair / slots));
    static Workspace& space = *new Workspace;  // one for all layers: only one runs at a time; never destroyed
    std::lock_guard lock(space.mutex);
    for (size_t t = 0; t < tokens; t += kTokensAtOnce)
        forward_some(x + t * hidden(), ids + t * slots, weights + t * slots, std::min(kTokensAtOnce, tokens - t), slots,
                     out + t * hidden(), space);
}

void ExpertLayer::sort_by_expert(const int64_t* ids, size_t pairs, Workspace& space) const {
    space.starts.assign(experts() + 1, 0);
    for (size_t pair = 0; pair < pairs; ++pair) ++space.starts[static_cast<size_t>(ids[pair]) + 1];
    space.spans.clear();
    for (size_t e = 0; e < experts(); ++e) {
        space.starts[e + 1] += space.starts[e];
        if (space.starts[e + 1] > space.starts[e]) space.spans.push_back({e, space.starts[e], space.starts[e + 1]});
    }
    space.position.resize(std::max(space.position.size(), pairs));
    for (size_t pair = 0; pair < pairs; ++pair) space.position[pair] = space.starts[static_cast<size_t>(ids[pair])]++;
}

void ExpertLayer::forward_some(const float* x, const int64_t* ids, const float* weights, size_t tokens, size_t slots,
                               float* out, Workspace& space) const {
    const size_t pairs = tokens * slots;
    const auto grow = [](auto& buffer, size_t size) {
        if (buffer.size() < size) buffer.resize(size);
    };
    sort_by_expert(ids, pairs, space);
    space.mid_stride = round_up(intermediate(), kGroup);
    grow(space.input, pairs);
    grow(space.mid_row, pairs);
    grow(space.mid, pairs * space.mid_stride);
    grow(space.partial, pairs * hidden());

    size_t x_stride = hidden();
    if (hidden() % kGroup != 0) {
        x_stride = round_up(hidden(), kGroup);
        space.padded.assign(tokens * x_stride, 0.0f);
        for (size_t t = 0; t < tokens; ++t) std::copy_n(x + t * hidden(), hidden(), &space.padded[t * x_stride]);
        x = space.padded.data();
    }
    for (size_t pair = 0; pair < pairs; ++pair) {
        const size_t at = space.position[pair];
        space.input[at] = x + pair / slots * x_stride;
        space.mid_row[at] = space.mid.data() + at * space.mid_stride;
    }

    const std::shared_ptr<ThreadPool> pool = shared_pool();
    const size_t gate_blocks = (intermediate() + gate_block_rows_ - 1) / gate_block_rows_;
    pool->for_each(space.spans.size() * gate_blocks,
                   [&](size_t task) { gate_up(space.spans[task / gate_blocks], task % gate_blocks, space); });
    const size_t down_blocks = (hidden() + down_block_rows_ - 1) / down_block_rows_;
    pool->for_each(space.spans.size() * down_blocks,
                   [&](size_t task) { down(space.spans[task / down_blocks], task % down_blocks, space); });

    constexpr size_t kTokensPerTask = 16;
    pool->for_each((tokens + kTokensPerTask - 1) / kTokensPerTask, [&](size_t task) {
        for (size_t t = task * kTokensPerTask; t < std::min(tokens, (task + 1) * kTokensPerTask); ++t) {
            float* sum = out + t * hidden();
            std::fill_n(sum, hidden(), 0.0f);
            for (size_t pair = t * slots; pair < (t + 1) * slots; ++pair) {
                const float weight = weights[pair];
                const float* term = space.partial.data() + space.position[pair] * hidden();
                for (size_t i = 0; i < hidden(); ++i) sum[i] += weight * term[i];
            }
        }
    });
}

void ExpertLayer::gate_up(const Span& span, size_t block, Workspace& space) const {
    const size_t first = block * gate_block_rows_, rows = std::min(gate_block_rows_, intermediate() - first);
    const uint8_t* gate = gate_.data[span.expert] + first * row_bytes(gate_.quant, hidden());
    const uint8_t* up = up_.data[span.expert] + first * row_bytes(up_.quant, hidden());
    const auto gate_kernel = kernels_.matrix[static_cast<size_t>(gate_.quant)];
    const auto up_kernel = kernels_.matrix[static_cast<size_t>(up_.quant)];
    const size_t stride = round_up(rows, 8);
    alignas(64) float gates[kTokensPerPass * kMaxBlockRows] = {}, ups[kTokensPerPass * kMaxBlockRows] = {};
    for (size_t begin = span.begin; begin < span.end; begin += kTokensPerPass) {
        const size_t tokens = std::min(kTokensPerPass, span.end - begin);
        gate_kernel(gate, rows, hidden(), &space.input[begin], tokens, gates, stride);
        up_kernel(up, rows, hidden(), &space.input[begin], tokens, ups, stride);
        kernels_.silu_gate(gates, ups, tokens * stride);
        for (size_t t = 0; t < tokens; ++t) {
            float* mid = space.mid.data() + (begin + t) * space.mid_stride;
            std::copy_n(gates + t * stride, rows, mid + first);
            if (first + rows == intermediate()) std::fill(mid + intermediate(), mid + space.mid_stride, 0.0f);
        }
    }
}

void ExpertLayer::down(const Span& span, size_t block, Workspace& space) const {
    const size_t first = block * down_block_rows_, rows = std::min(down_block_rows_, hidden() - first);
    kernels_.matrix[static_cast<size_t>(down_.quant)](
        down_.data[span.expert] + first * row_bytes(down_.quant, intermediate()), rows, intermediate(),
        &space.mid_row[span.begin], span.end - span.begin, space.partial.data() + span.begin * hidden() + first,
        hidden());
}

}  // namespace ktqueue
