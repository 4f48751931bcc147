#include "prepared_rows.h"

#include <cstring>

#include "aligned_buffer.h"

namespace ktqueue {

namespace {

using Kind = RowForm::Kind;

}  // namespace

RowForm row_form(const KernelTable& kernels, Quant quant, Precision precision, size_t tokens) {
    const bool tiles = kernels.bf16_tiles && quant == Quant::BF16 && tokens >= kernels.tile_tokens;
    if (precision == Precision::Fast && tiles) return {Kind::Narrow, {}};
    if (precision == Precision::Exact || is_float(quant)) return {Kind::Floats, {}};
    return {Kind::Slabs, activation_kind(quant)};
}

PanelKernel panel_kernel(const KernelTable& kernels, Quant quant, RowForm form) {
    const auto index = static_cast<size_t>(quant);
    if (form.kind == Kind::Narrow) return kernels.bf16_tiles;
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

void prepare_row(const KernelTable& kernels, RowForm form, const float* x, size_t columns, void* out) {
    if (form.kind == Kind::Slabs) {
        kernels.quantize(x, columns, form.activation, static_cast<ActivationSlab*>(out));
    } else if (form.kind == Kind::Narrow) {
        kernels.narrow(x, columns, static_cast<uint16_t*>(out));
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
