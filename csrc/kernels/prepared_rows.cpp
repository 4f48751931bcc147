#include "kernels/prepared_rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "formats/aligned_buffer.h"

namespace ktqueue {

namespace {

using Kind = RowForm::Kind;

std::atomic<bool> batch_invariant = false;

// The number of rows that share weights from which tiles multiply them.
size_t tile_threshold(const KernelTable& kernels, Quant quant) {
    if (!batch_invariant) return kernels.tile_tokens[static_cast<size_t>(quant)];
    return takes_floats(quant) ? 1 : std::numeric_limits<size_t>::max();
}

}  // namespace

void set_batch_invariant(bool on) {
    batch_invariant = on;
}

// Halves hold 2^-14 to 2^16. The largest weight must stay below 2^15, and x is multiplied by the inverse of the
// weights' factor times 2^16. Steps of 2^4, so that matrices that share x mostly share its prepared rows too.
float tile_unit(float bound) {
    constexpr int kStep = 4, kMost = 100;
    if (!(bound < std::ldexp(1.0f, kMost))) return 0;
    const int exponent = bound > 0 ? std::max(std::ilogb(bound) + 2, -kMost) : 0;  // 1.0025 * bound < 2^exponent
    return std::ldexp(1.0f, (exponent + 2 * kMost + kStep - 1) / kStep * kStep - 2 * kMost + 1);
}

RowForm row_form(const KernelTable& kernels, Quant quant, Precision precision, size_t tokens, float unit) {
    const auto index = static_cast<size_t>(quant);
    if (precision == Precision::Fast && kernels.tiles[index] && tokens >= tile_threshold(kernels, quant)) {
        if (is_float(quant)) return {Kind::Bf16, {}, 0};
        if (unit > 0) return {Kind::Shuffled, {}, unit};
    }
    if (precision == Precision::Exact || takes_floats(quant)) return {Kind::Floats, {}, 0};
    return {Kind::Slabs, activation_kind(quant), 0};
}

bool at_constant_distance(RowForm form) {
    return form.kind == Kind::Bf16 || form.kind == Kind::Shuffled;
}

PanelKernel panel_kernel(const KernelTable& kernels, Quant quant, RowForm form) {
    const auto index = static_cast<size_t>(quant);
    if (at_constant_distance(form)) return kernels.tiles[index];
    return form.kind == Kind::Slabs ? kernels.dot[index] : kernels.exact[index];
}

size_t prepared_bytes(RowForm form, size_t columns) {
    const size_t slabs = (columns + kSlab - 1) / kSlab;
    if (form.kind == Kind::Slabs) return slabs * sizeof(ActivationSlab);
    return slabs * kSlab * (form.kind == Kind::Floats ? sizeof(float) : sizeof(uint16_t));
}

size_t row_distance(RowForm form, size_t columns) {
    return round_up(prepared_bytes(form, columns), kCacheLine) | kCacheLine;
}

size_t part_size(size_t tokens, size_t most) {
    const size_t parts = (tokens + most - 1) / most;
    return std::min(most, round_up((tokens + parts - 1) / std::max<size_t>(1, parts), kPanelRows));
}

void prepare_row(const KernelTable& kernels, RowForm form, const float* x, size_t columns, void* out) {
    if (form.kind == Kind::Slabs) {
        kernels.quantize(x, columns, form.activation, static_cast<ActivationSlab*>(out));
    } else if (form.kind == Kind::Bf16) {
        kernels.bf16_row(x, columns, static_cast<uint16_t*>(out));
    } else if (form.kind == Kind::Shuffled) {
        kernels.shuffle(x, columns, form.unit, static_cast<uint16_t*>(out));
    } else {
        auto* floats = static_cast<float*>(out);
        std::memcpy(floats, x, columns * sizeof(float));
        std::memset(floats + columns, 0, (round_up(columns, kSlab) - columns) * sizeof(float));
    }
}

void prepare_columns(const KernelTable& kernels, RowForm form, const float* x, size_t column, size_t count, void* out) {
    prepare_row(kernels, form, x, count, static_cast<uint8_t*>(out) + prepared_bytes(form, column));
}

}  // namespace ktqueue
