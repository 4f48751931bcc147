#include "model/linear.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "formats/aligned_buffer.h"
#include "threads/thread_pool.h"

namespace ktqueue {

namespace {

constexpr size_t kMaxLinears = 8;
constexpr size_t kTaskBytes = 64 * 1024;  // of weights in one task, at most
constexpr size_t kAloneBytes =
    24 * 1024;  // of weights times tokens: with less, waking other threads costs more than it saves
constexpr size_t kTokensAtOnce = 64;  // tokens that stay in a core's second-level cache while panels pass
constexpr size_t kTileTokens = 256;   // the same for tiles, where an unpacked superblock should serve many rows
constexpr size_t kMaxTaskPanels = 16;

}  // namespace

Linear::Linear(const StoredMatrix& weights, const float* bias, Precision precision, const KernelTable& kernels)
    : quant_(weights.quant),
      rows_(weights.rows),
      columns_(weights.columns),
      panel_bytes_(ktqueue::panel_bytes(weights.quant, weights.columns)),
      precision_(precision),
      kernels_(kernels),
      arena_(panel_count(weights.rows) * panel_bytes_) {
    if (bias) bias_.assign(bias, bias + rows_);
    std::atomic<float> bound = 0;
    shared_pool()->for_each(panel_count(rows_), [&](size_t panel) {
        raise(bound, pack_panel(weights, panel, arena_.data() + panel * panel_bytes_));
    });
    unit_ = tile_unit(bound);
}

// One call of run_linears(). A task is a run of panels; tasks go matrix by matrix.
class LinearJob {
  public:
    LinearJob(const LinearCall* calls, size_t count, const float* x, size_t x_stride, size_t tokens)
        : calls_(calls), count_(count), x_(x), x_stride_(x_stride), tokens_(tokens) {
        const Linear& first = *calls[0].linear;
        for (size_t i = 0; i < count; ++i) {
            const Linear& linear = *calls[i].linear;
            if (linear.columns_ != first.columns_ || &linear.kernels_ != &first.kernels_)
                throw std::invalid_argument("linears of one call must agree in columns and kernels");
            forms_[i] = linear.form(tokens);
        }
    }

    void run(const std::shared_ptr<ThreadPool>& pool) {
        static Space& space = *new Space;  // shared by all calls; never destroyed
        std::lock_guard lock(space.mutex);
        prepare(*pool, space);
        size_t bytes = 0;
        for (size_t i = 0; i < count_; ++i) bytes += calls_[i].linear->bytes();
        const bool alone = bytes * tokens_ < kAloneBytes;
        const size_t target = std::clamp<size_t>(bytes / (4 * pool->threads()), 4096, kTaskBytes);
        size_t tasks = 0;
        for (size_t i = 0; i < count_; ++i) {
            const size_t panels = std::clamp<size_t>(target / calls_[i].linear->panel_bytes_, 1, kMaxTaskPanels);
            panels_[i] = alone ? kMaxTaskPanels : panels;
            first_task_[i] = tasks;
            tasks += (panel_count(calls_[i].linear->rows_) + panels_[i] - 1) / panels_[i];
        }
        if (alone) {
            for (size_t task = 0; task < tasks; ++task) compute(task, space);
        } else {
            pool->for_each(tasks, [&](size_t task) { compute(task, space); });
        }
    }

  private:
    struct Space {
        std::mutex mutex;
        AlignedBuffer<uint8_t> rows[kMaxLinears];  // prepared rows; index: the first matrix that needs the form
        std::vector<const void*> x[kMaxLinears];   // [tokens]
    };

    // Prepares the rows once in each form that is needed. Float rows without padding are used in place.
    void prepare(ThreadPool& pool, Space& space) {
        for (size_t i = 0; i < count_; ++i) {
            source_[i] = 0;
            while (!(forms_[source_[i]] == forms_[i])) ++source_[i];
            if (source_[i] == i) prepare_form(pool, space, i);
        }
    }

    void prepare_form(ThreadPool& pool, Space& space, size_t i) {
        const Linear& linear = *calls_[i].linear;
        const RowForm form = forms_[i];
        if (space.x[i].size() < tokens_) space.x[i].resize(tokens_);
        if (form.kind == RowForm::Kind::Floats && linear.columns_ % kSlab == 0) {
            for (size_t t = 0; t < tokens_; ++t) space.x[i][t] = x_ + t * x_stride_;
            return;
        }
        const size_t bytes = row_distance(form, linear.columns_);
        space.rows[i].grow(tokens_ * bytes);
        auto row = [&](size_t t) {
            uint8_t* out = space.rows[i].data() + t * bytes;
            space.x[i][t] = out;
            prepare_row(linear.kernels_, form, x_ + t * x_stride_, linear.columns_, out);
        };
        if (tokens_ < 8) {
            for (size_t t = 0; t < tokens_; ++t) row(t);
        } else {
            pool.for_each(tokens_, [&](size_t t) { row(t); });
        }
    }

    void compute(size_t task, const Space& space) const {
        size_t i = count_ - 1;
        while (task < first_task_[i]) --i;
        const Linear& linear = *calls_[i].linear;
        const PanelKernel kernel = panel_kernel(linear.kernels_, linear.quant_, forms_[i]);
        const size_t first = (task - first_task_[i]) * panels_[i];
        const size_t last = std::min(first + panels_[i], panel_count(linear.rows_));
        // The last panel may have more rows than the matrix. It goes through a buffer, so that nothing is written
        // beyond the row.
        const size_t whole = std::min(last, linear.rows_ / kPanelRows);
        const size_t at_once =
            part_size(tokens_, forms_[i].kind == RowForm::Kind::Shuffled ? kTileTokens : kTokensAtOnce);
        for (size_t t = 0; t < tokens_; t += at_once) {
            const size_t tokens = std::min(at_once, tokens_ - t);
            PanelTask part{linear.arena_.data() + first * linear.panel_bytes_,
                           whole > first ? whole - first : 0,
                           linear.panel_bytes_,
                           linear.columns_,
                           space.x[source_[i]].data() + t,
                           tokens,
                           calls_[i].y + t * calls_[i].y_stride + first * kPanelRows,
                           calls_[i].y_stride,
                           forms_[i].unit};
            if (part.panels) kernel(part);
            if (whole < last) compute_rest(kernel, linear, part, whole, calls_[i].y + t * calls_[i].y_stride);
            if (!linear.bias_.empty()) add_bias(linear, first, last, calls_[i].y + t * calls_[i].y_stride, tokens, i);
        }
    }

    static void compute_rest(PanelKernel kernel, const Linear& linear, PanelTask part, size_t panel, float* y) {
        const size_t stride = part.y_stride, row = panel * kPanelRows;
        alignas(64) float buffer[kTileTokens * kPanelRows];
        part.weights = linear.arena_.data() + panel * linear.panel_bytes_;
        part.panels = 1;
        part.y = buffer;
        part.y_stride = kPanelRows;
        kernel(part);
        for (size_t t = 0; t < part.tokens; ++t)
            std::copy_n(buffer + t * kPanelRows, linear.rows_ - row, y + t * stride + row);
    }

    void add_bias(const Linear& linear, size_t first, size_t last, float* y, size_t tokens, size_t i) const {
        const size_t begin = first * kPanelRows, end = std::min(last * kPanelRows, linear.rows_);
        for (size_t t = 0; t < tokens; ++t)
            for (size_t r = begin; r < end; ++r) y[t * calls_[i].y_stride + r] += linear.bias_[r];
    }

    const LinearCall* calls_;
    size_t count_;
    const float* x_;
    size_t x_stride_, tokens_;
    RowForm forms_[kMaxLinears];
    size_t source_[kMaxLinears], panels_[kMaxLinears], first_task_[kMaxLinears];
};

void run_linears(const LinearCall* calls, size_t count, const float* x, size_t x_stride, size_t tokens) {
    if (count == 0 || tokens == 0) return;
    if (count > kMaxLinears) throw std::invalid_argument("a call has at most 8 linears");
    LinearJob(calls, count, x, x_stride, tokens).run(shared_pool());
}

void Linear::forward(const float* x, size_t x_stride, size_t tokens, float* y, size_t y_stride) const {
    const LinearCall call{this, y, y_stride};
    run_linears(&call, 1, x, x_stride, tokens);
}

}  // namespace ktqueue
