// The Python face of the kernels; it and the bindings_* files are all that knows Python. Arrays come through the buffer protocol or DLPack.
// Every size, type and stride is checked here or by the function called, and a wrong one is a ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "bindings_arrays.h"
#include "bindings_probe.h"
#include "cpu_budget.h"
#include "expert_layer.h"
#include "linear.h"
#include "paged_attention.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace ktqueue {
namespace {

// (quant name, rows, columns, one uint8 array an expert, bias [experts, rows] float32 or None).
ExpertMatrices parse_matrices(const nb::tuple& packed, const char* name) {
    std::string quant;
    ExpertMatrices matrices{};
    if (packed.size() != 5 || !nb::try_cast(packed[0], quant) || !nb::try_cast(packed[1], matrices.rows) ||
        !nb::try_cast(packed[2], matrices.columns))
        throw std::invalid_argument(std::string(name) + " must be (quant, rows, columns, arrays, bias)");
    matrices.quant = parse_quant(quant);
    const size_t bytes = matrices.rows * row_bytes(matrices.quant, matrices.columns);
    for (nb::handle one : packed[3]) {
        ReadOnly array;
        if (!nb::try_cast(one, array)) throw std::invalid_argument(std::string(name) + " must hold uint8 arrays");
        require<uint8_t>(array, name, {static_cast<int64_t>(bytes)});
        matrices.data.push_back(data<uint8_t>(array));
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
    constexpr const char* kNames[] = {"silu", "gelu", "gelu_tanh", "swiglu_clamped"};
    for (size_t i = 0; i < std::size(kNames); ++i)
        if (name == kNames[i]) return static_cast<Activation>(i);
    throw std::invalid_argument("activation must be silu, gelu, gelu_tanh or swiglu_clamped, got '" + name + "'");
}

Precision parse_precision(const std::string& activations) {
    if (activations == "int8") return Precision::Fast;
    if (activations == "float32") return Precision::Exact;
    throw std::invalid_argument("activations must be int8 or float32, got '" + activations + "'");
}

class BoundLayer {
  public:
    BoundLayer(const nb::tuple& gate, const nb::tuple& up, const nb::tuple& down, const std::string& activation,
               float alpha, float limit, const std::string& activations, const std::string& isa) {
        ExpertMatrices three[] = {parse_matrices(gate, "gate"), parse_matrices(up, "up"), parse_matrices(down, "down")};
        const ExpertOptions options{parse_activation(activation), alpha, limit, parse_precision(activations)};
        const KernelTable& kernels = kernels_named(isa);
        nb::gil_scoped_release release;
        layer_.emplace(std::move(three[0]), std::move(three[1]), std::move(three[2]), options, kernels);
    }

    void forward(const ReadOnly& x, const ReadOnly& ids, const ReadOnly& weights, const Writable& out) const {
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

    const char* isa() const { return layer_->isa(); }
    size_t bytes() const { return layer_->bytes(); }

  private:
    std::optional<ExpertLayer> layer_;
};

class BoundLinear {
  public:
    BoundLinear(const std::string& quant, size_t rows, size_t columns, const ReadOnly& packed,
                const std::optional<ReadOnly>& bias, const std::string& activations, const std::string& isa) {
        const Quant kind = parse_quant(quant);
        require<uint8_t>(packed, "data", {static_cast<int64_t>(rows * row_bytes(kind, columns))});
        if (bias) require<float>(*bias, "bias", {static_cast<int64_t>(rows)});
        const StoredMatrix matrix{kind, rows, columns, data<uint8_t>(packed)};
        const Precision precision = parse_precision(activations);
        const KernelTable& kernels = kernels_named(isa);
        nb::gil_scoped_release release;
        linear_.emplace(matrix, bias ? data<float>(*bias) : nullptr, precision, kernels);
    }

    void forward(const ReadOnly& x, const Writable& out) const {
        require<float>(x, "x", {kAny, static_cast<int64_t>(linear_->columns())});
        require<float>(out, "out", {static_cast<int64_t>(x.shape(0)), static_cast<int64_t>(linear_->rows())});
        nb::gil_scoped_release release;
        linear_->forward(data<float>(x), linear_->columns(), x.shape(0), data<float>(out), linear_->rows());
    }

    size_t bytes() const { return linear_->bytes(); }

  private:
    std::optional<Linear> linear_;
};

void bound_dequantize(const std::string& quant, const ReadOnly& packed, const Writable& out) {
    const Quant kind = parse_quant(quant);
    require<float>(out, "out", {kAny});
    const size_t count = out.shape(0);
    const size_t bytes = count == 0 ? 0 : row_bytes(kind, count);
    require<uint8_t>(packed, "data", {static_cast<int64_t>(bytes)});
    nb::gil_scoped_release release;
    dequantize_kernel(kind)(data<uint8_t>(packed), count, data<float>(out));
}

void bound_attention(const ReadOnly& query, const ReadOnly& key, const ReadOnly& value, const Writable& cache_keys,
                     const Writable& cache_values, const ReadOnly& query_starts, const ReadOnly& context_lengths,
                     const ReadOnly& page_table, const ReadOnly& slot_mapping, float scaling, size_t sliding_window,
                     const Writable& out, const std::string& isa) {
    require<float>(query, "query", {kAny, kAny, kAny}, false);
    const auto heads = static_cast<int64_t>(query.shape(0)), tokens = static_cast<int64_t>(query.shape(1)),
               head_dim = static_cast<int64_t>(query.shape(2));
    require<float>(key, "key", {kAny, tokens, head_dim}, false);
    const auto kv_heads = static_cast<int64_t>(key.shape(0));
    require<float>(value, "value", {kv_heads, tokens, head_dim}, false);
    require<float>(cache_keys, "cache_keys", {kAny, kAny, kv_heads, head_dim});
    const auto pages = static_cast<int64_t>(cache_keys.shape(0)), page_size = static_cast<int64_t>(cache_keys.shape(1));
    require<float>(cache_values, "cache_values", {pages, page_size, kv_heads, head_dim});
    require<int32_t>(context_lengths, "context_lengths", {kAny});
    const auto rows = static_cast<int64_t>(context_lengths.shape(0));
    require<int32_t>(query_starts, "query_starts", {rows + 1});
    require<int32_t>(page_table, "page_table", {rows, kAny});
    require<int64_t>(slot_mapping, "slot_mapping", {tokens});
    require<float>(out, "out", {tokens, heads, head_dim});
    const PagedStep step = {
        .query_starts = data<int32_t>(query_starts),
        .context_lengths = data<int32_t>(context_lengths),
        .page_table = data<int32_t>(page_table),
        .slot_mapping = data<int64_t>(slot_mapping),
        .tokens = query.shape(1),
        .rows = context_lengths.shape(0),
        .max_pages = page_table.shape(1),
        .pages = cache_keys.shape(0),
        .page_size = cache_keys.shape(1),
    };
    const AttentionShape shape = {query.shape(0), key.shape(0), query.shape(2)};
    const CacheUpdate update = {
        .key = data<float>(key),
        .value = data<float>(value),
        .key_head_stride = stride(key, 0),
        .key_token_stride = stride(key, 1),
        .value_head_stride = stride(value, 0),
        .value_token_stride = stride(value, 1),
        .cache_keys = data<float>(cache_keys),
        .cache_values = data<float>(cache_values),
    };
    const AttentionLayer layer = {
        .query = data<float>(query),
        .query_head_stride = stride(query, 0),
        .query_token_stride = stride(query, 1),
        .cache_keys = update.cache_keys,
        .cache_values = update.cache_values,
        .scaling = scaling,
        .sliding_window = sliding_window,
        .output = data<float>(out),
    };
    const KernelTable& kernels = kernels_named(isa);
    nb::gil_scoped_release release;
    check(shape);
    check(step);
    AttentionPlan plan;
    plan_attention(step, shape, nullptr, 0, plan);
    write_cache(step, shape, update);
    attend(step, shape, plan, layer, kernels);
}

}  // namespace
}  // namespace ktqueue

NB_MODULE(_kernels, module) {
    using namespace ktqueue;
    nb::set_leak_warnings(false);  // a model that lives until the interpreter ends is no leak
    module.doc() = "Compiled kernels of ktqueue. Call them through ktqueue.operators.native.";
    module.def("isa", [] { return best_kernels().isa; });
    module.def("isas", &present_kernels);
    module.def("default_threads", &default_threads);
    module.def("threads", [] { return shared_pool()->threads(); });
    module.def("nodes", [] { return shared_pool()->nodes(); });
    module.def(
        "set_threads",
        [](size_t threads, uint32_t spin_microseconds, const std::string& pin, size_t pretend_nodes) {
            set_shared_pool(threads, spin_microseconds, parse_pin(pin), pretend_nodes);
        },
        nb::arg("threads"), nb::arg("spin_microseconds"), nb::arg("pin") = "auto", nb::arg("pretend_nodes") = 0,
        nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "row_bytes", [](const std::string& quant, size_t columns) { return row_bytes(parse_quant(quant), columns); },
        nb::arg("quant"), nb::arg("columns"));
    module.def("dequantize", &bound_dequantize, nb::arg("quant"), nb::arg("data"), nb::arg("out"));
    module.def("paged_attention", &bound_attention, nb::arg("query"), nb::arg("key"), nb::arg("value"),
               nb::arg("cache_keys"), nb::arg("cache_values"), nb::arg("query_starts"), nb::arg("context_lengths"),
               nb::arg("page_table"), nb::arg("slot_mapping"), nb::arg("scaling"), nb::arg("sliding_window"),
               nb::arg("out"), nb::arg("isa") = "");
    nb::class_<BoundLayer>(module, "ExpertLayer")
        .def(nb::init<const nb::tuple&, const nb::tuple&, const nb::tuple&, const std::string&, float, float,
                      const std::string&, const std::string&>(),
             nb::arg("gate"), nb::arg("up"), nb::arg("down"), nb::arg("activation"), nb::arg("alpha"), nb::arg("limit"),
             nb::arg("activations"), nb::arg("isa"))
        .def("forward", &BoundLayer::forward, nb::arg("hidden_states"), nb::arg("top_k_index"),
             nb::arg("top_k_weights"), nb::arg("out"))
        .def_prop_ro("isa", &BoundLayer::isa)
        .def_prop_ro("bytes", &BoundLayer::bytes);
    nb::class_<BoundLinear>(module, "Linear")
        .def(nb::init<const std::string&, size_t, size_t, const ReadOnly&, const std::optional<ReadOnly>&,
                      const std::string&, const std::string&>(),
             nb::arg("quant"), nb::arg("rows"), nb::arg("columns"), nb::arg("data"), nb::arg("bias").none(),
             nb::arg("activations"), nb::arg("isa"))
        .def("forward", &BoundLinear::forward, nb::arg("x"), nb::arg("out"))
        .def_prop_ro("bytes", &BoundLinear::bytes);
    bind_probe(module);
}
