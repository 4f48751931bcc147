// The Python module of the kernels. Only csrc/bindings knows Python. Arrays come through the buffer protocol or DLPack.
// Every size, type and stride is checked here or by the called function, and a wrong one raises ValueError.
#include "bindings/module.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings/arrays.h"
#include "bindings/weights.h"
#include "formats/quantize.h"
#include "isa/ladder.h"
#include "model/paged_attention.h"
#include "model/token_masks.h"
#include "threads/cpus.h"
#include "threads/thread_pool.h"

namespace nb = nanobind;

namespace ktqueue {
namespace {

void bound_dequantize(const std::string& quant, const ReadOnly& packed, const Writable& out) {
    const Quant kind = parse_quant(quant);
    require<float>(out, "out", {kAny});
    const size_t count = out.shape(0);
    const size_t bytes = count == 0 ? 0 : row_bytes(kind, count);
    require<uint8_t>(packed, "data", {static_cast<int64_t>(bytes)});
    nb::gil_scoped_release release;
    dequantize_kernel(kind)(data<uint8_t>(packed), count, data<float>(out));
}

void bound_quantize(const std::string& quant, const ReadOnly& values, const std::optional<ReadOnly>& importance,
                    const Writable& out) {
    const Quantizer& quantizer = find_quantizer(quant);
    require<float>(values, "values", {kAny, kAny});
    const size_t rows = values.shape(0), columns = values.shape(1);
    if (columns % quantizer.block_weights)
        throw std::invalid_argument("row length must be a multiple of " + std::to_string(quantizer.block_weights) +
                                    " weights for " + quant + ", got " + std::to_string(columns));
    if (importance) require<float>(*importance, "importance", {static_cast<int64_t>(columns)});
    const size_t bytes = columns / quantizer.block_weights * quantizer.block_bytes;
    require<uint8_t>(out, "out", {static_cast<int64_t>(rows), static_cast<int64_t>(bytes)});
    nb::gil_scoped_release release;
    quantize(quantizer, data<float>(values), rows, columns, importance ? data<float>(*importance) : nullptr,
             data<uint8_t>(out));
}

void bound_attention(const ReadOnly& query, const ReadOnly& key, const ReadOnly& value, const Writable& cache_keys,
                     const Writable& cache_values, const ReadOnly& query_starts, const ReadOnly& context_lengths,
                     const ReadOnly& page_table, const ReadOnly& slot_mapping, float scaling, float score_cap,
                     size_t sliding_window, size_t chunk, const std::optional<ReadOnly>& sinks, const Writable& out,
                     const std::string& isa) {
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
    if (sinks) require<float>(*sinks, "sinks", {heads});
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
        .score_cap = score_cap,
        .sliding_window = sliding_window,
        .chunk = chunk,
        .sinks = sinks ? data<float>(*sinks) : nullptr,
        .output = data<float>(out),
        .choice = nullptr,
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

void bound_mask_logits(const Writable& logits, const ReadOnly& masks, const std::vector<size_t>& rows) {
    require<float>(logits, "logits", {kAny, kAny});
    const size_t scored = logits.shape(0), vocab = logits.shape(1), words = (vocab + 31) / 32;
    require<int32_t>(masks, "masks", {static_cast<int64_t>(rows.size()), static_cast<int64_t>(words)});
    for (size_t row : rows)
        if (row >= scored)
            throw std::invalid_argument("rows has " + std::to_string(row) + ", but there are " +
                                        std::to_string(scored) + " rows of logits");
    const auto* mask = reinterpret_cast<const uint32_t*>(data<int32_t>(masks));
    nb::gil_scoped_release release;
    for (size_t i = 0; i < rows.size(); ++i)
        mask_logits(data<float>(logits) + rows[i] * vocab, vocab, mask + i * words);
}

}  // namespace
}  // namespace ktqueue

NB_MODULE(_kernels, module) {
    using namespace ktqueue;
    nb::set_leak_warnings(false);  // a model that lives until the interpreter exits is not a leak
    module.doc() = "Compiled kernels of ktqueue. Call them through ktqueue.operators.native.";
    module.def("isa", [] { return best_kernels().isa; });
    module.def("isas", &present_kernels);
    module.def(
        "tile_rows",
        [](const std::string& quant, const std::string& isa) {
            return kernels_named(isa).tile_tokens[static_cast<size_t>(parse_quant(quant))];
        },
        nb::arg("quant"), nb::arg("isa"));
    module.def("set_batch_invariant", &set_batch_invariant, nb::arg("on"));
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
    module.def("quantize", &bound_quantize, nb::arg("quant"), nb::arg("values"), nb::arg("importance").none(),
               nb::arg("out"));
    module.def("paged_attention", &bound_attention, nb::arg("query"), nb::arg("key"), nb::arg("value"),
               nb::arg("cache_keys"), nb::arg("cache_values"), nb::arg("query_starts"), nb::arg("context_lengths"),
               nb::arg("page_table"), nb::arg("slot_mapping"), nb::arg("scaling"), nb::arg("score_cap"),
               nb::arg("sliding_window"), nb::arg("chunk"), nb::arg("sinks").none(), nb::arg("out"),
               nb::arg("isa") = "");
    module.def("mask_logits", &bound_mask_logits, nb::arg("logits"), nb::arg("masks"), nb::arg("rows"));
    bind_weights(module);
    bind_decoder(module);
    bind_handoff(module);
    bind_probe(module);
}
