#include "bindings/weights.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/module.h"
#include "isa/ladder.h"

namespace ktqueue {
namespace {

// Parses (quant name, rows, columns, one uint8 array per expert, bias [experts, rows] float32 or None). `held` keeps
// the arrays alive, because the sequence may create them on access.
ExpertMatrices parse_matrices(const nb::tuple& packed, const char* name, std::vector<ReadOnly>& held) {
    std::string quant;
    ExpertMatrices matrices{};
    if (packed.size() != 5 || !nb::try_cast(packed[0], quant) || !nb::try_cast(packed[1], matrices.rows) ||
        !nb::try_cast(packed[2], matrices.columns))
        throw std::invalid_argument(std::string(name) + " must be (quant, rows, columns, arrays, bias)");
    matrices.quant = parse_quant(quant);
    const size_t bytes = matrix_bytes(matrices.quant, matrices.rows, matrices.columns);
    for (nb::handle item : packed[3]) {
        ReadOnly array;
        if (!nb::try_cast(item, array)) throw std::invalid_argument(std::string(name) + " must hold uint8 arrays");
        require<uint8_t>(array, name, {static_cast<int64_t>(bytes)});
        matrices.data.push_back(data<uint8_t>(array));
        held.push_back(std::move(array));
    }
    if (!packed[4].is_none()) {
        ReadOnly bias;
        if (!nb::try_cast(packed[4], bias)) throw std::invalid_argument(std::string(name) + " has no array as bias");
        require<float>(bias, "bias", {static_cast<int64_t>(matrices.data.size()), static_cast<int64_t>(matrices.rows)});
        matrices.bias.assign(data<float>(bias), data<float>(bias) + bias.size());
    }
    return matrices;
}

Activation parse_activation(const std::string& name) {
    constexpr const char* kNames[] = {"silu", "gelu", "gelu_tanh", "swiglu_clamped", "silu_limited"};
    for (size_t i = 0; i < std::size(kNames); ++i)
        if (name == kNames[i]) return static_cast<Activation>(i);
    throw std::invalid_argument("activation must be silu, gelu, gelu_tanh, swiglu_clamped or silu_limited, got '" +
                                name + "'");
}

Precision parse_precision(const std::string& activations) {
    if (activations == "int8") return Precision::Fast;
    if (activations == "float32") return Precision::Exact;
    throw std::invalid_argument("activations must be int8 or float32, got '" + activations + "'");
}

}  // namespace

BoundExpertLayer::BoundExpertLayer(const nb::tuple& gate, const nb::tuple& up, const nb::tuple& down,
                                   const std::string& activation, float alpha, float limit, bool weighted_input,
                                   const std::string& activations, const std::string& isa) {
    std::vector<ReadOnly> held;
    ExpertMatrices three[] = {parse_matrices(gate, "gate", held), parse_matrices(up, "up", held),
                              parse_matrices(down, "down", held)};
    const ExpertOptions options{parse_activation(activation), alpha, limit, parse_precision(activations),
                                weighted_input};
    const KernelTable& kernels = kernels_named(isa);
    nb::gil_scoped_release release;
    layer_.emplace(std::move(three[0]), std::move(three[1]), std::move(three[2]), options, kernels);
}

void BoundExpertLayer::forward(const ReadOnly& x, const ReadOnly& ids, const ReadOnly& weights,
                               const Writable& out) const {
    const auto hidden = static_cast<int64_t>(layer_->hidden());
    require<float>(x, "hidden_states", {kAny, hidden});
    const auto tokens = static_cast<int64_t>(x.shape(0));
    require<int64_t>(ids, "top_k_index", {tokens, kAny});
    require<float>(weights, "top_k_weights", {tokens, static_cast<int64_t>(ids.shape(1))});
    require<float>(out, "out", {tokens, hidden});
    nb::gil_scoped_release release;
    layer_->forward(data<float>(x), data<int64_t>(ids), data<float>(weights), x.shape(0), ids.shape(1),
                    data<float>(out));
}

std::vector<std::pair<uintptr_t, size_t>> BoundExpertLayer::ranges(size_t expert) const {
    std::vector<std::pair<uintptr_t, size_t>> found;
    for (const auto& range : layer_->ranges(expert))
        found.emplace_back(reinterpret_cast<uintptr_t>(range.data()), range.size());
    return found;
}

std::vector<std::vector<uintptr_t>> BoundExpertLayer::prefetch_lines(const std::vector<size_t>& experts,
                                                                     size_t most_bytes, uint64_t stop_after) const {
    std::atomic<uint64_t> asked = 0;
    std::vector<std::vector<uintptr_t>> found;
    for (const auto& lines : layer_->prefetch_lines(experts, most_bytes, [&] { return asked++ >= stop_after; })) {
        std::vector<uintptr_t>& addresses = found.emplace_back();
        for (const uint8_t* line : lines) addresses.push_back(reinterpret_cast<uintptr_t>(line));
    }
    return found;
}

BoundLinear::BoundLinear(const std::string& quant, size_t rows, size_t columns, const ReadOnly& packed,
                         const std::optional<ReadOnly>& bias, const std::string& activations, const std::string& isa) {
    const Quant kind = parse_quant(quant);
    require<uint8_t>(packed, "data", {static_cast<int64_t>(matrix_bytes(kind, rows, columns))});
    if (bias) require<float>(*bias, "bias", {static_cast<int64_t>(rows)});
    const StoredMatrix matrix{kind, rows, columns, data<uint8_t>(packed)};
    const Precision precision = parse_precision(activations);
    const KernelTable& kernels = kernels_named(isa);
    nb::gil_scoped_release release;
    linear_.emplace(matrix, bias ? data<float>(*bias) : nullptr, precision, kernels);
}

void BoundLinear::forward(const ReadOnly& x, const Writable& out) const {
    require<float>(x, "x", {kAny, static_cast<int64_t>(linear_->columns())});
    require<float>(out, "out", {static_cast<int64_t>(x.shape(0)), static_cast<int64_t>(linear_->rows())});
    nb::gil_scoped_release release;
    linear_->forward(data<float>(x), linear_->columns(), x.shape(0), data<float>(out), linear_->rows());
}

void bind_weights(nb::module_& module) {
    module.def(
        "packed_bytes",
        [](const std::string& quant, size_t rows, size_t columns) {
            return panel_count(rows) * panel_bytes(parse_quant(quant), columns);
        },
        nb::arg("quant"), nb::arg("rows"), nb::arg("columns"));
    nb::class_<BoundExpertLayer>(module, "ExpertLayer")
        .def(nb::init<const nb::tuple&, const nb::tuple&, const nb::tuple&, const std::string&, float, float, bool,
                      const std::string&, const std::string&>(),
             nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("activation"), nb::arg("alpha"), nb::arg("limit"),
             nb::arg("weighted_input"), nb::arg("activations"), nb::arg("isa"))
        .def("forward", &BoundExpertLayer::forward, nb::arg("hidden_states"), nb::arg("top_k_index"),
             nb::arg("top_k_weights"), nb::arg("out"))
        .def("ranges", &BoundExpertLayer::ranges, nb::arg("expert"))
        .def("prefetch_lines", &BoundExpertLayer::prefetch_lines, nb::arg("experts"), nb::arg("most_bytes"),
             nb::arg("stop_after"))
        .def_prop_ro("isa", [](const BoundExpertLayer& bound) { return bound.layer().isa(); })
        .def_prop_ro("bytes", [](const BoundExpertLayer& bound) { return bound.layer().bytes(); });
    nb::class_<BoundLinear>(module, "Linear")
        .def(nb::init<const std::string&, size_t, size_t, const ReadOnly&, const std::optional<ReadOnly>&,
                      const std::string&, const std::string&>(),
             nb::arg("quant"), nb::arg("rows"), nb::arg("columns"), nb::arg("data"), nb::arg("bias").none(),
             nb::arg("activations"), nb::arg("isa"))
        .def("forward", &BoundLinear::forward, nb::arg("x"), nb::arg("out"))
        .def_prop_ro("address",
                     [](const BoundLinear& bound) { return reinterpret_cast<uintptr_t>(bound.linear().panels()); })
        .def_prop_ro("bytes", [](const BoundLinear& bound) { return bound.linear().bytes(); });
}

}  // namespace ktqueue
