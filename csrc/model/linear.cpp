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

size_t tokens_at_once(RowForm form, size_t tokens) {
    return part_size(tokens, form.kind == RowForm::Kind::Shuffled ? kTileTokens : kTokensAtOnce);
}

// Runs the kernel where y has only `rows` rows. A last panel with more of them goes through a buffer, so that nothing
// is written beyond.
void multiply(PanelKernel kernel, PanelTask task, size_t rows) {
    const size_t panels = task.panels;
    task.panels = std::min(panels, rows / kPanelRows);
    if (task.panels) kernel(task);
    if (task.panels == panels) return;
    alignas(64) float buffer[kTileTokens * kPanelRows];
    const size_t row = task.panels * kPanelRows;
    const PanelTask whole = task;
    task.weights += task.panels * task.panel_stride;
    task.panels = 1;
    task.y = buffer;
    task.y_stride = kPanelRows;
    kernel(task);
    for (size_t t = 0; t < task.tokens; ++t)
        std::copy_n(buffer + t * kPanelRows, rows - row, whole.y + t * whole.y_stride + row);
}

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
        const size_t at_once = tokens_at_once(forms_[i], tokens_);
        for (size_t t = 0; t < tokens_; t += at_once) {
            const size_t tokens = std::min(at_once, tokens_ - t);
            float* y = calls_[i].y + t * calls_[i].y_stride;
            multiply(
                kernel,
                {linear.arena_.data() + first * linear.panel_bytes_, last - first, linear.panel_bytes_, linear.columns_,
                 space.x[source_[i]].data() + t, tokens, y + first * kPanelRows, calls_[i].y_stride, forms_[i].unit},
                linear.rows_ - first * kPanelRows);
            if (!linear.bias_.empty()) add_bias(linear, first, last, y, tokens, i);
        }
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

// One call of run_heads(). A task is some panels of one head and a part of the tokens. It prepares its rows itself.
class HeadsJob {
  public:
    HeadsJob(const HeadsCall& call, size_t tokens, size_t threads)
        : call_(call),
          tokens_(tokens),
          form_(call.linear->form(tokens)),
          panels_(panel_count(call.rows)),
          at_once_(tokens_at_once(form_, tokens)),
          parts_((tokens + at_once_ - 1) / at_once_) {
        const size_t wanted = std::clamp<size_t>(2 * threads / (call.heads * parts_), 1, panels_);
        of_slice_ = (panels_ + wanted - 1) / wanted;
        slices_ = (panels_ + of_slice_ - 1) / of_slice_;
    }

    size_t tasks() const { return call_.heads * parts_ * slices_; }

    void compute(size_t task) const {
        thread_local AlignedBuffer<uint8_t> prepared;
        const void* rows[kTileTokens];
        const Linear& linear = *call_.linear;
        const size_t head = task / (parts_ * slices_), first_token = task / slices_ % parts_ * at_once_;
        const size_t tokens = std::min(at_once_, tokens_ - first_token);
        const size_t first = task % slices_ * of_slice_, last = std::min(first + of_slice_, panels_);
        const float* x = call_.x + first_token * call_.x_token_stride + head * call_.x_head_stride;
        const bool in_place = form_.kind == RowForm::Kind::Floats && linear.columns_ % kSlab == 0;
        const size_t bytes = row_distance(form_, linear.columns_);
        if (!in_place) prepared.grow(tokens * bytes);
        for (size_t t = 0; t < tokens; ++t) {
            const float* row = x + t * call_.x_token_stride;
            rows[t] = row;
            if (in_place) continue;
            prepare_row(linear.kernels_, form_, row, linear.columns_, prepared.data() + t * bytes);
            rows[t] = prepared.data() + t * bytes;
        }
        float* y = call_.y + first_token * call_.y_token_stride + head * call_.y_head_stride + first * kPanelRows;
        multiply(panel_kernel(linear.kernels_, linear.quant_, form_),
                 {linear.arena_.data() + (head * panels_ + first) * linear.panel_bytes_, last - first,
                  linear.panel_bytes_, linear.columns_, rows, tokens, y, call_.y_token_stride, form_.unit},
                 call_.rows - first * kPanelRows);
    }

  private:
    const HeadsCall& call_;
    const size_t tokens_;
    const RowForm form_;
    const size_t panels_, at_once_, parts_;  // panels of a head; tokens of a part
    size_t of_slice_, slices_;               // panels of a task; tasks of a head and a part
};

void run_heads(const HeadsCall& call, size_t tokens) {
    if (tokens == 0) return;
    const auto pool = shared_pool();
    const HeadsJob job(call, tokens, pool->threads());
    if (call.linear->bytes() * tokens < kAloneBytes) {
        for (size_t task = 0; task < job.tasks(); ++task) job.compute(task);
    } else {
        pool->for_each(job.tasks(), [&](size_t task) { job.compute(task); });
    }
}

void Linear::forward(const float* x, size_t x_stride, size_t tokens, float* y, size_t y_stride) const {
    const LinearCall call{this, y, y_stride};
    run_linears(&call, 1, x, x_stride, tokens);
}

}  // namespace ktqueue
