#include "experts/expert_layer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "formats/aligned_buffer.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

constexpr size_t kTokensAtOnce = 2048;    // with all of their experts; limits the workspace
constexpr size_t kMostAtOnce = 8192;      // tokens of which many have no expert here: each pass reads its experts again
constexpr size_t kTaskBytes = 64 * 1024;  // of weights in one task, at most
constexpr size_t kTokensPerPass = 64;     // of one expert; limits the buffers on a task's stack
constexpr size_t kTileTokens = 256;       // the same for tiles, if few panels leave room for it
constexpr size_t kMaxTaskPanels = 8;      // of gate; even, so that a task produces whole slabs of activations
constexpr size_t kPairRows = 2 * kPanelRows;
constexpr size_t kMaxSlots = 64;  // experts of one token
constexpr int64_t kNoExpert = -1;
constexpr size_t kSkipped = SIZE_MAX;  // position of a pair that has no expert

void check(const ExpertMatrices& matrices, const char* name, size_t experts, size_t rows, size_t columns) {
    if (matrices.data.size() != experts || matrices.rows != rows || matrices.columns != columns)
        throw std::invalid_argument(std::string(name) + " must be " + std::to_string(experts) + " matrices of " +
                                    std::to_string(rows) + " x " + std::to_string(columns) + ", got " +
                                    std::to_string(matrices.data.size()) + " of " + std::to_string(matrices.rows) +
                                    " x " + std::to_string(matrices.columns));
    if (!matrices.bias.empty() && matrices.bias.size() != experts * rows)
        throw std::invalid_argument(std::string(name) + " must have " + std::to_string(experts * rows) +
                                    " biases, got " + std::to_string(matrices.bias.size()));
}

size_t bytes_of(const ExpertMatrices& matrices) {
    return panel_bytes(matrices.quant, matrices.columns);
}

}  // namespace

// The consecutive sorted pairs of one expert.
struct ExpertLayer::Span {
    size_t expert, begin, end;
    size_t size() const { return end - begin; }
};

// The forms of an expert's rows, which depend on how many there are.
struct ExpertLayer::Forms {
    RowForm gate, up, down;
    Forms(const ExpertLayer& layer, size_t tokens)
        : gate(row_form(layer.kernels_, layer.gate_.quant, layer.options_.precision, tokens, layer.gate_up_unit_)),
          up(row_form(layer.kernels_, layer.up_.quant, layer.options_.precision, tokens, layer.gate_up_unit_)),
          down(row_form(layer.kernels_, layer.down_.quant, layer.options_.precision, tokens, layer.down_unit_)) {}
};

// A *pair* is a (token, slot). Buffers only grow. "Sorted" positions list the pairs that have an expert, expert by
// expert, in order of pair.
struct ExpertLayer::Workspace {
    std::mutex mutex;
    std::vector<size_t> starts;              // [experts + 1] first position of each expert
    AlignedBuffer<size_t> position;          // [pairs] index of the pair in sorted order, or kSkipped
    std::vector<Span> spans;                 // experts that have pairs
    std::vector<std::array<bool, 2>> tiled;  // [experts] whether gate, up run on tiles
    // Rows prepared for gate (and for up, if its form is equal), and rows prepared for up if not: [tokens], and for
    // tiles [pairs], sorted.
    AlignedBuffer<uint8_t> rows[2][2];       // [tiled][gate, up]
    AlignedBuffer<const void*> x[2];         // [gate, up][pairs] sorted
    AlignedBuffer<uint8_t> activated;        // [pairs] prepared for down, sorted
    AlignedBuffer<const void*> activated_x;  // [pairs] sorted
    AlignedBuffer<float> partial;            // [pairs, hidden up to 16], sorted
    AlignedBuffer<float> factors;            // [pairs] of gate and up, sorted; only with weighted inputs
    size_t activated_bytes = 0, partial_stride = 0;
};

ExpertLayer::ExpertLayer(ExpertMatrices gate, ExpertMatrices up, ExpertMatrices down, const ExpertOptions& options,
                         const KernelTable& kernels)
    : gate_(std::move(gate)),
      up_(std::move(up)),
      down_(std::move(down)),
      options_(options),
      kernels_(kernels),
      gate_panel_(bytes_of(gate_)),
      up_panel_(bytes_of(up_)),
      gate_up_panels_(shared_pool()->nodes(), gate_.data.size(), panel_count(gate_.rows), gate_panel_ + up_panel_),
      down_panels_(shared_pool()->nodes(), gate_.data.size(), panel_count(gate_.columns), bytes_of(down_)) {
    if (gate_.data.empty() || gate_.rows == 0)
        throw std::invalid_argument("gate must have at least one expert and one row");
    check(gate_, "gate", experts(), intermediate(), hidden());
    check(up_, "up", experts(), intermediate(), hidden());
    check(down_, "down", experts(), hidden(), intermediate());
    pack();
}

void ExpertLayer::pack() {
    std::atomic<float> gate_up_bound = 0, down_bound = 0;
    const auto pack_one = [](const ExpertMatrices& from, const char* name, size_t expert, size_t panel, uint8_t* to) {
        try {
            return pack_panel({from.quant, from.rows, from.columns, from.data[expert]}, panel, to);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(std::string(name) + " of expert " + std::to_string(expert) + ": " +
                                        error.what());
        }
    };
    // In the order of the nodes, so that a thread of the node that will read a page is the first to touch it. A dense
    // model's layer is one expert, and packing it must occupy all threads too.
    const std::shared_ptr<ThreadPool> pool = shared_pool();
    const auto job = [&](const ExpertPanels& panels) {
        const size_t step = std::max<size_t>(2, panels.panels() * experts() / (8 * pool->threads()));
        return PanelJob{panels, experts(), std::min(panels.panels(), step)};
    };
    const PanelJob gate_up = job(gate_up_panels_), down = job(down_panels_);
    pool->for_each(gate_up.tasks(), [&](size_t task) {
        const auto [expert, first, last] = gate_up.block(task);
        uint8_t* to = gate_up_panels_.range(expert, first, last).data();
        for (size_t p = first; p < last; ++p, to += gate_up_panels_.panel_bytes()) {
            raise(gate_up_bound, pack_one(gate_, "gate", expert, p, to));
            raise(gate_up_bound, pack_one(up_, "up", expert, p, to + gate_panel_));
        }
    });
    pool->for_each(down.tasks(), [&](size_t task) {
        const auto [expert, first, last] = down.block(task);
        uint8_t* to = down_panels_.range(expert, first, last).data();
        for (size_t p = first; p < last; ++p, to += down_panels_.panel_bytes())
            raise(down_bound, pack_one(down_, "down", expert, p, to));
    });
    gate_up_unit_ = tile_unit(gate_up_bound);
    down_unit_ = tile_unit(down_bound);
    for (ExpertMatrices* matrices : {&gate_, &up_, &down_})
        std::fill(matrices->data.begin(), matrices->data.end(), nullptr);
}

void ExpertLayer::forward(const float* x, const int64_t* ids, const float* weights, size_t tokens, size_t slots,
                          float* out, bool zeros) const {
    for (size_t pair = 0; pair < tokens * slots; ++pair)
        if (ids[pair] < kNoExpert || ids[pair] >= static_cast<int64_t>(experts()))
            throw std::invalid_argument("expert id must be from 0 to " + std::to_string(experts() - 1) +
                                        " or -1 for none, got " + std::to_string(ids[pair]) + " for token " +
                                        std::to_string(pair / slots));
    if (slots > kMaxSlots) throw std::invalid_argument("a token has at most 64 experts, got " + std::to_string(slots));
    static Workspace& space = *new Workspace;  // shared by all layers, since only one runs at a time; never destroyed
    std::lock_guard lock(space.mutex);
    for (size_t first = 0, last = 0; first < tokens; first = last) {
        for (size_t pairs = 0; last < tokens && last < first + kMostAtOnce; ++last) {
            const int64_t* own = ids + last * slots;
            pairs += slots - static_cast<size_t>(std::count(own, own + slots, kNoExpert));
            if (pairs > kTokensAtOnce * slots) break;
        }
        forward_some(x + first * hidden(), ids + first * slots, weights + first * slots, last - first, slots,
                     out + first * hidden(), zeros, space);
    }
}

void ExpertLayer::sort_by_expert(const int64_t* ids, size_t pairs, Workspace& space) const {
    space.starts.assign(experts() + 1, 0);
    for (size_t pair = 0; pair < pairs; ++pair)
        if (ids[pair] != kNoExpert) ++space.starts[static_cast<size_t>(ids[pair]) + 1];
    space.spans.clear();
    for (size_t e = 0; e < experts(); ++e) {
        space.starts[e + 1] += space.starts[e];
        if (space.starts[e + 1] > space.starts[e]) space.spans.push_back({e, space.starts[e], space.starts[e + 1]});
    }
    space.position.grow(pairs);
    for (size_t pair = 0; pair < pairs; ++pair)
        space.position[pair] = ids[pair] == kNoExpert ? kSkipped : space.starts[static_cast<size_t>(ids[pair])]++;
}

// Prepares rows for gate and up: one per token, shared by its slots; for tiles one per pair that has an expert, adjacent.
void ExpertLayer::prepare_rows(const float* x, const int64_t* ids, size_t tokens, size_t slots, size_t pairs,
                               Workspace& space) const {
    struct Rows {
        RowForm form;
        size_t bytes, source;  // which buffer holds them: gate's, if up needs the same form
        bool wanted;
    };
    const Forms few(*this, 1), many(*this, SIZE_MAX);
    const auto rows = [&](RowForm form, size_t source) {
        return Rows{form, row_distance(form, hidden()), source, false};
    };
    Rows all[2][2] = {{rows(few.gate, 0), rows(few.up, few.up == few.gate ? 0 : 1)},
                      {rows(many.gate, 0), rows(many.up, many.up == many.gate ? 0 : 1)}};  // [tiled][gate, up]
    space.tiled.assign(experts(), {});
    for (const Span& span : space.spans) {
        const Forms forms(*this, span.size());
        space.tiled[span.expert] = {at_constant_distance(forms.gate), at_constant_distance(forms.up)};
        for (size_t side : {0, 1}) {
            Rows(&same)[2] = all[space.tiled[span.expert][side]];
            same[same[side].source].wanted = true;
        }
    }
    for (size_t tiled : {0, 1})
        for (size_t side : {0, 1})
            if (all[tiled][side].wanted)
                space.rows[tiled][side].grow((tiled ? pairs : tokens) * all[tiled][side].bytes);
    for (auto& pointers : space.x) pointers.grow(pairs);
    auto prepare = [&](size_t t) {
        const float* row = x + t * hidden();
        const uint8_t* made[2] = {};  // prepared rows for tiles of this token
        const size_t* positions = space.position.data() + t * slots;
        if (std::all_of(positions, positions + slots, [](size_t position) { return position == kSkipped; })) return;
        for (size_t side : {0, 1}) {
            const Rows& prepared = all[0][side];
            if (prepared.wanted)
                prepare_row(kernels_, prepared.form, row, hidden(), space.rows[0][side].data() + t * prepared.bytes);
        }
        for (size_t slot = 0; slot < slots; ++slot) {
            const size_t position = positions[slot];
            if (position == kSkipped) continue;
            const auto tiled = space.tiled[static_cast<size_t>(ids[t * slots + slot])];
            for (size_t side : {0, 1}) {
                const Rows& prepared = all[1][side];
                if (!prepared.wanted || !(tiled[0] || tiled[1])) continue;
                uint8_t* out = space.rows[1][side].data() + position * prepared.bytes;
                if (made[side]) {
                    std::memcpy(out, made[side], prepared_bytes(prepared.form, hidden()));
                } else {
                    prepare_row(kernels_, prepared.form, row, hidden(), out);
                    made[side] = out;
                }
            }
            for (size_t side : {0, 1}) {
                const Rows& prepared = all[tiled[side]][side];
                space.x[side][position] =
                    space.rows[tiled[side]][prepared.source].data() + (tiled[side] ? position : t) * prepared.bytes;
            }
        }
    };
    if (tokens < 8) {
        for (size_t t = 0; t < tokens; ++t) prepare(t);
    } else {
        shared_pool()->for_each(tokens, [&](size_t t) { prepare(t); });
    }
}

// The jobs that forward() gives to the pool for `spans` experts. prefetch() relies on the same division.
ExpertLayer::Jobs ExpertLayer::jobs(const ThreadPool& pool, size_t spans, bool tiles) const {
    const size_t slices = 16 * pool.threads();
    // With tiles, most of a task's time is its start, so tasks are larger.
    const size_t task_bytes = tiles ? 2 * kTaskBytes : kTaskBytes;
    const auto job = [&](const ExpertPanels& panels, size_t most) {
        const size_t bytes = panels.panel_bytes();
        const size_t target = std::clamp<size_t>(spans * panels.panels() * bytes / slices, 8192, task_bytes);
        return PanelJob{panels, spans, std::clamp<size_t>(target / bytes / 2 * 2, 2, most)};
    };
    return {job(gate_up_panels_, kMaxTaskPanels), job(down_panels_, down_panels_.panels() + 1)};
}

void ExpertLayer::forward_some(const float* x, const int64_t* ids, const float* weights, size_t tokens, size_t slots,
                               float* out, bool zeros, Workspace& space) const {
    sort_by_expert(ids, tokens * slots, space);
    const size_t pairs = space.spans.empty() ? 0 : space.spans.back().end;  // that have an expert
    prepare_rows(x, ids, tokens, slots, pairs, space);
    space.partial_stride = round_up(hidden(), kPanelRows) + kPanelRows;  // pairs that have an expert
    space.activated_bytes = 0;  // an expert with many rows has another form of activations than one with few
    for (const Span& span : space.spans)
        space.activated_bytes =
            std::max(space.activated_bytes, row_distance(Forms(*this, span.size()).down, intermediate()));
    space.activated.grow(pairs * space.activated_bytes);
    space.activated_x.grow(pairs);
    space.partial.grow(pairs * space.partial_stride);
    for (size_t position = 0; position < pairs; ++position)
        space.activated_x[position] = space.activated.data() + position * space.activated_bytes;
    if (options_.weighted_input) {
        space.factors.grow(pairs);
        for (size_t pair = 0; pair < tokens * slots; ++pair)
            if (space.position[pair] != kSkipped) space.factors[space.position[pair]] = weights[pair];
    }

    const std::shared_ptr<ThreadPool> pool = shared_pool();
    const bool tiles = std::ranges::any_of(space.tiled, [](const auto& tiled) { return tiled[0] || tiled[1]; });
    const Jobs both = jobs(*pool, space.spans.size(), tiles);
    pool->for_each(both.gate_up.tasks(), [&](size_t task) {
        const auto [span, first, last] = both.gate_up.block(task);
        gate_up(space.spans[span], first, last, space);
    });
    pool->for_each(both.down.tasks(), [&](size_t task) {
        const auto [span, first, last] = both.down.block(task);
        down(space.spans[span], first, last, space);
    });
    auto merge_token = [&](size_t t) { merge(weights, t * slots, (t + 1) * slots, out + t * hidden(), zeros, space); };
    if (tokens < 4) {
        for (size_t t = 0; t < tokens; ++t) merge_token(t);
    } else {
        pool->for_each(tokens, [&](size_t t) { merge_token(t); });
    }
}

// Multiplies panels first..last-1 of gate and up, applies the activation, and prepares the result for down.
void ExpertLayer::gate_up(const Span& span, size_t first, size_t last, const Workspace& space) const {
    const Forms forms(*this, span.size());
    const size_t pair_bytes = gate_up_panels_.panel_bytes(), panels = last - first, stride = panels * kPairRows;
    const uint8_t* weights = gate_up_panels_.range(span.expert, first, last).data();
    const float unit = gate_up_unit_;
    const bool together = gate_.quant == up_.quant;  // else one panel at a time, each with its own kernel
    const PanelKernel gate_kernel = panel_kernel(kernels_, gate_.quant, forms.gate);
    const PanelKernel up_kernel = panel_kernel(kernels_, up_.quant, forms.up);
    alignas(64) float both[kTokensPerPass * kMaxTaskPanels * kPairRows];
    alignas(64) float activated[kMaxTaskPanels * kPanelRows];
    const size_t column = first * kPanelRows, count = std::min(last * kPanelRows, intermediate()) - column;
    const bool shuffled = forms.gate.kind == RowForm::Kind::Shuffled || forms.up.kind == RowForm::Kind::Shuffled;
    const size_t room = std::min(kTileTokens, kTokensPerPass * kMaxTaskPanels / panels);
    const size_t at_once = part_size(span.size(), shuffled ? room : kTokensPerPass);
    for (size_t begin = span.begin; begin < span.end; begin += at_once) {
        const size_t tokens = std::min(at_once, span.end - begin);
        if (together) {
            gate_kernel({weights, 2 * panels, gate_panel_, hidden(), &space.x[0][begin], tokens, both, stride, unit});
        } else {
            for (size_t p = 0; p < panels; ++p) {
                const uint8_t* pair = weights + p * pair_bytes;
                float* y = both + p * kPairRows;
                gate_kernel({pair, 1, gate_panel_, hidden(), &space.x[0][begin], tokens, y, stride, unit});
                up_kernel({pair + gate_panel_, 1, up_panel_, hidden(), &space.x[1][begin], tokens, y + kPanelRows,
                           stride, unit});
            }
        }
        for (size_t t = 0; t < tokens; ++t) {
            float* row = both + t * stride;
            if (options_.weighted_input)  // gate and up are linear, so their factor is that of the input
                for (size_t i = 0; i < stride; ++i) row[i] *= space.factors[begin + t];
            for (size_t r = 0; r < count && !gate_.bias.empty(); ++r)
                row[r / kPanelRows * kPairRows + r % kPanelRows] +=
                    gate_.bias[span.expert * intermediate() + column + r];
            for (size_t r = 0; r < count && !up_.bias.empty(); ++r)
                row[r / kPanelRows * kPairRows + kPanelRows + r % kPanelRows] +=
                    up_.bias[span.expert * intermediate() + column + r];
        }
        const auto activation = static_cast<size_t>(options_.activation);
        // Only this task's columns of the rows are written.
        uint8_t* out = const_cast<uint8_t*>(space.activated.data()) + begin * space.activated_bytes;
        const bool tiles = forms.down.kind == RowForm::Kind::Shuffled;
        if (tiles || forms.down.kind == RowForm::Kind::Slabs) {
            (tiles ? kernels_.activate_tiles : kernels_.activate)[activation](
                {both, stride, tokens, panels, out + prepared_bytes(forms.down, column), space.activated_bytes,
                 forms.down.activation, forms.down.unit, options_.alpha, options_.limit});
            continue;
        }
        for (size_t t = 0; t < tokens; ++t, out += space.activated_bytes) {
            const float* row = both + t * stride;
            kernels_.gate[activation]({row, row + kPanelRows, activated, panels, options_.alpha, options_.limit});
            prepare_columns(kernels_, forms.down, activated, column, count, out);
        }
    }
}

void ExpertLayer::down(const Span& span, size_t first, size_t last, const Workspace& space) const {
    const Forms forms(*this, span.size());
    const size_t stride = space.partial_stride, row = first * kPanelRows;
    float* y =
        const_cast<float*>(space.partial.data()) + span.begin * stride + row;  // only this task's columns are written
    const uint8_t* weights = down_panels_.range(span.expert, first, last).data();
    panel_kernel(kernels_, down_.quant,
                 forms.down)({weights, last - first, down_panels_.panel_bytes(), intermediate(),
                              &space.activated_x[span.begin], span.size(), y, stride, forms.down.unit});
    if (down_.bias.empty()) return;
    const float* bias = &down_.bias[span.expert * hidden() + row];
    for (size_t t = 0; t < span.size(); ++t)
        for (size_t r = 0; r < std::min(last * kPanelRows, hidden()) - row; ++r) y[t * stride + r] += bias[r];
}

// out = the weighted sum over pairs first..last-1, which are those of one token. Without `zeros`, an empty one stays.
void ExpertLayer::merge(const float* weights, size_t first, size_t last, float* out, bool zeros,
                        const Workspace& space) const {
    const float* terms[kMaxSlots];
    float factors[kMaxSlots];
    size_t count = 0;
    for (size_t pair = first; pair < last; ++pair) {
        if (space.position[pair] == kSkipped) continue;
        terms[count] = space.partial.data() + space.position[pair] * space.partial_stride;
        factors[count++] = options_.weighted_input ? 1.0f : weights[pair];
    }
    if (count || zeros) kernels_.merge({terms, factors, count, out, hidden()});
}

}  // namespace ktqueue
