#include "model/decoder.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/module.h"
#include "bindings/weights.h"
#include "isa/ladder.h"

namespace ktqueue {
namespace {

std::vector<float> vector_of(const ReadOnly& array, const char* name) {
    require<float>(array, name, {kAny});
    return {data<float>(array), data<float>(array) + array.size()};
}

// Linear attention of a layer; its matrices are owned by Python.
struct BoundLinearAttention {
    LinearAttention layer;

    BoundLinearAttention(size_t key_heads, size_t value_heads, size_t key_dim, size_t value_dim, bool tiled,
                         const BoundLinear& qkv, const BoundLinear& gate, const BoundLinear& decay,
                         const BoundLinear& rate, const ReadOnly& convolution, const ReadOnly& decay_rates,
                         const ReadOnly& decay_biases, const ReadOnly& norm) {
        require<float>(convolution, "convolution", {kAny, kAny});
        layer = {
            .shape = {key_heads, value_heads, key_dim, value_dim, convolution.shape(0), tiled},
            .qkv = &qkv.linear(),
            .gate = &gate.linear(),
            .decay = &decay.linear(),
            .rate = &rate.linear(),
            .convolution = {data<float>(convolution), data<float>(convolution) + convolution.size()},
            .decay_rates = vector_of(decay_rates, "decay_rates"),
            .decay_biases = vector_of(decay_biases, "decay_biases"),
            .norm = vector_of(norm, "norm"),
        };
    }
};

// The indexer of a layer; its matrices are owned by Python.
struct BoundIndexer {
    Indexer indexer;

    BoundIndexer(size_t heads, size_t columns, const BoundLinear& query, const BoundLinear& key,
                 const BoundLinear& weights, const ReadOnly& norm, float epsilon)
        : indexer{heads, columns, &query.linear(), &key.linear(), &weights.linear(), vector_of(norm, "norm"), epsilon} {
    }
};

// Latent attention of a layer; its matrices are owned by Python.
struct BoundLatentAttention {
    LatentAttention layer;

    BoundLatentAttention(size_t heads, size_t latent, size_t plain, size_t rotary, size_t value,
                         const BoundLinear* low_rank, const BoundLinear& query, const BoundLinear& key,
                         const BoundLinear& absorb, const BoundLinear& expand, const ReadOnly& low_rank_norm,
                         const ReadOnly& latent_norm, float epsilon, float growth, float period, size_t chosen,
                         const BoundIndexer* indexer)
        : layer{
              .shape = {heads, latent, plain, rotary, value},
              .low_rank = low_rank ? &low_rank->linear() : nullptr,
              .query = &query.linear(),
              .key = &key.linear(),
              .absorb = &absorb.linear(),
              .expand = &expand.linear(),
              .low_rank_norm = vector_of(low_rank_norm, "low_rank_norm"),
              .latent_norm = vector_of(latent_norm, "latent_norm"),
              .epsilon = epsilon,
              .growth = growth,
              .period = period,
              .chosen = chosen,
              .indexer = indexer ? std::optional(indexer->indexer) : std::nullopt,
          } {}
};

// A decoder with the arrays that it reads in a step, all owned by Python: embedding, cache and rotary table.
class BoundDecoder {
  public:
    BoundDecoder(size_t hidden, float scaling, float epsilon, float embedding_scale, bool norm_after_rotary,
                 float score_cap, float logit_cap, const std::string& quant, const ReadOnly& embedding,
                 const ReadOnly& norm, const BoundLinear& head, float logit_scale, const std::string& isa,
                 float value_scale, bool softplus_gate)
        : embedding_(embedding),
          decoder_({hidden, scaling, epsilon, embedding_scale, logit_scale, norm_after_rotary, score_cap, logit_cap,
                    value_scale, softplus_gate},
                   stored(quant, head.linear().rows(), hidden, embedding), vector_of(norm, "norm"), head.linear(),
                   kernels_named(isa)) {}

    void add_layer(size_t heads, size_t kv_heads, size_t head_dim, const ReadOnly& attention_norm, const BoundLinear* q,
                   const BoundLinear* k, const BoundLinear* v, const BoundLinear& o, const BoundLinear* gate,
                   const BoundLinearAttention* linear_attention, const BoundLatentAttention* latent_attention,
                   const ReadOnly& q_norm, const ReadOnly& k_norm, const ReadOnly& v_norm, float clip,
                   size_t rotary_table, size_t rotary_pairs, size_t sliding_window, size_t chunk, float growth,
                   float period, const ReadOnly& sinks, const ReadOnly& mlp_norm, const BoundExpertLayer* mlp,
                   const BoundLinear* shared_gate, const BoundLinear* router, const BoundExpertLayer* experts,
                   size_t experts_per_token, bool renormalise, bool sigmoid, float scale, size_t groups,
                   size_t groups_used, const ReadOnly& bias, float jitter, const ReadOnly& scales,
                   const ReadOnly& router_norm, const ReadOnly& experts_norm, const ReadOnly& shared_out_norm,
                   const ReadOnly& experts_out_norm, const ReadOnly& attention_out_norm, const ReadOnly& mlp_out_norm,
                   float out_scale) {
        const auto linear = [](const BoundLinear* bound) { return bound ? &bound->linear() : nullptr; };
        decoder_.add_layer({
            .attention_norm = vector_of(attention_norm, "attention_norm"),
            .attention = {heads, kv_heads, head_dim},
            .q = linear(q),
            .k = linear(k),
            .o = &o.linear(),
            .v = linear(v),
            .gate = linear(gate),
            .linear_attention = linear_attention ? std::optional(linear_attention->layer) : std::nullopt,
            .latent_attention = latent_attention ? std::optional(latent_attention->layer) : std::nullopt,
            .q_norm = vector_of(q_norm, "q_norm"),
            .k_norm = vector_of(k_norm, "k_norm"),
            .v_norm = vector_of(v_norm, "v_norm"),
            .clip = clip,
            .rotary_table = rotary_table,
            .rotary_pairs = rotary_pairs,
            .sliding_window = sliding_window,
            .chunk = chunk,
            .growth = growth,
            .period = period,
            .sinks = vector_of(sinks, "sinks"),
            .attention_out_norm = vector_of(attention_out_norm, "attention_out_norm"),
            .feed_forward =
                {
                    .norm = vector_of(mlp_norm, "mlp_norm"),
                    .router_norm = vector_of(router_norm, "router_norm"),
                    .experts_norm = vector_of(experts_norm, "experts_norm"),
                    .mlp = mlp ? &mlp->layer() : nullptr,
                    .shared_gate = linear(shared_gate),
                    .router = linear(router),
                    .experts = experts ? &experts->layer() : nullptr,
                    .routing = {experts_per_token, renormalise, sigmoid, scale, groups, groups_used,
                                vector_of(bias, "bias"), jitter, vector_of(scales, "scales")},
                    .shared_out_norm = vector_of(shared_out_norm, "shared_out_norm"),
                    .experts_out_norm = vector_of(experts_out_norm, "experts_out_norm"),
                    .out_norm = vector_of(mlp_out_norm, "mlp_out_norm"),
                    .out_scale = out_scale,
                },
        });
    }

    void set_rotary(const ReadOnly& cosine, const ReadOnly& sine) {
        require<float>(cosine, "cosine", {kAny, kAny, kAny});
        const auto size = [&](size_t i) { return static_cast<int64_t>(cosine.shape(i)); };
        require<float>(sine, "sine", {size(0), size(1), size(2)});
        cosine_ = cosine;
        sine_ = sine;
        rotary_ = {data<float>(cosine), data<float>(sine), cosine.shape(0), cosine.shape(1), cosine.shape(2)};
    }

    void set_cache(const std::vector<Writable>& keys, const std::vector<Writable>& values,
                   const std::vector<Writable>& index_keys) {
        const auto& shapes = decoder_.attention_layers();
        if (keys.size() != shapes.size() || values.size() != shapes.size())
            throw std::invalid_argument("the cache must have " + std::to_string(shapes.size()) + " layers, got " +
                                        std::to_string(keys.size()));
        const auto pages = keys.empty() || keys[0].ndim() != 4 ? kAny : static_cast<int64_t>(keys[0].shape(0));
        const auto page_size = pages == kAny ? kAny : static_cast<int64_t>(keys[0].shape(1));
        std::vector<float*> key_data, value_data;
        for (const auto* arrays : {&keys, &values})
            for (size_t i = 0; i < shapes.size(); ++i) {
                require<float>((*arrays)[i], "cache",
                               {pages, page_size, static_cast<int64_t>(shapes[i].kv_heads),
                                static_cast<int64_t>(shapes[i].head_dim)});
                (arrays == &keys ? key_data : value_data).push_back(data<float>((*arrays)[i]));
            }
        const size_t columns = decoder_.index_columns();
        if (index_keys.size() != (columns ? keys.size() : 0))
            throw std::invalid_argument("the cache must have an indexer's keys of " +
                                        std::to_string(columns ? keys.size() : 0) + " layers, got " +
                                        std::to_string(index_keys.size()));
        std::vector<float*> index_data;
        for (const Writable& array : index_keys) {
            require<float>(array, "index_keys", {pages, page_size, static_cast<int64_t>(columns)});
            index_data.push_back(data<float>(array));
        }
        cache_ = keys;
        cache_.insert(cache_.end(), values.begin(), values.end());
        cache_.insert(cache_.end(), index_keys.begin(), index_keys.end());
        index_keys_ = std::move(index_data);
        keys_ = std::move(key_data);
        values_ = std::move(value_data);
        pages_ = static_cast<size_t>(pages);
        page_size_ = static_cast<size_t>(page_size);
    }

    void set_hidden(const Writable& hidden) {
        require<float>(hidden, "hidden",
                       {static_cast<int64_t>(pages_), static_cast<int64_t>(page_size_),
                        static_cast<int64_t>(decoder_.shape().hidden)});
        hidden_ = hidden;
        hidden_data_ = data<float>(hidden);
    }

    void set_states(const std::vector<Writable>& recent, const std::vector<Writable>& states) {
        const auto& shapes = decoder_.linear_layers();
        if (recent.size() != shapes.size() || states.size() != shapes.size())
            throw std::invalid_argument("the cache must have states of " + std::to_string(shapes.size()) +
                                        " layers, got " + std::to_string(states.size()));
        const auto slots = states.empty() || states[0].ndim() != 4 ? kAny : static_cast<int64_t>(states[0].shape(0));
        std::vector<float*> recent_data, state_data;
        const auto size = [](size_t count) { return static_cast<int64_t>(count); };
        for (size_t i = 0; i < shapes.size(); ++i) {
            const LinearAttentionShape& shape = shapes[i];
            require<float>(recent[i], "recent", {slots, size(shape.taps - 1), size(shape.channels())});
            require<float>(states[i], "states",
                           {slots, size(shape.value_heads), size(shape.key_dim), size(shape.value_dim)});
            recent_data.push_back(data<float>(recent[i]));
            state_data.push_back(data<float>(states[i]));
        }
        state_cache_ = recent;
        state_cache_.insert(state_cache_.end(), states.begin(), states.end());
        recent_ = std::move(recent_data);
        states_ = std::move(state_data);
        slots_ = states.empty() ? 0 : static_cast<size_t>(slots);
    }

    void forward(const ReadOnly& input_ids, const ReadOnly& position_ids, const ReadOnly& scored,
                 const ReadOnly& query_starts, const ReadOnly& context_lengths, const ReadOnly& page_table,
                 const ReadOnly& slot_mapping, const ReadOnly& state_sources, const ReadOnly& state_targets,
                 const Writable& logits, const std::optional<ReadOnly>& inputs,
                 const std::optional<Writable>& outputs) {
        if (keys_.size() != decoder_.attention_layers().size() || states_.size() != decoder_.linear_layers().size() ||
            keys_.size() + states_.size() == 0)
            throw std::invalid_argument("the decoder has no layers or no cache yet");
        require<int64_t>(input_ids, "input_ids", {1, kAny});
        const auto tokens = static_cast<int64_t>(input_ids.shape(1));
        require<int64_t>(position_ids, "position_ids", {1, tokens});
        require<int64_t>(scored, "logits_to_keep", {kAny});
        require<int32_t>(context_lengths, "context_lengths", {kAny});
        const auto rows = static_cast<int64_t>(context_lengths.shape(0));
        require<int32_t>(query_starts, "query_starts", {rows + 1});
        require<int32_t>(page_table, "page_table", {rows, kAny});
        require<int64_t>(slot_mapping, "slot_mapping", {tokens});
        const int64_t states = states_.empty() ? 0 : rows;
        require<int32_t>(state_sources, "state_sources", {states});
        require<int32_t>(state_targets, "state_targets", {states});
        require<float>(logits, "logits",
                       {static_cast<int64_t>(scored.shape(0)), static_cast<int64_t>(decoder_.vocabulary())});
        const auto hidden = static_cast<int64_t>(decoder_.shape().hidden);
        if (inputs) require<float>(*inputs, "inputs", {tokens, hidden});
        if (outputs) require<float>(*outputs, "outputs", {static_cast<int64_t>(scored.shape(0)), hidden});
        if (outputs && hidden_data_)
            throw std::invalid_argument("outputs are not given where the hidden rows are kept");
        const DecoderStep step = {
            .ids = data<int64_t>(input_ids),
            .positions = data<int64_t>(position_ids),
            .scored = data<int64_t>(scored),
            .scored_count = scored.shape(0),
            .paged =
                {
                    .query_starts = data<int32_t>(query_starts),
                    .context_lengths = data<int32_t>(context_lengths),
                    .page_table = data<int32_t>(page_table),
                    .slot_mapping = data<int64_t>(slot_mapping),
                    .tokens = input_ids.shape(1),
                    .rows = context_lengths.shape(0),
                    .max_pages = page_table.shape(1),
                    .pages = pages_,
                    .page_size = page_size_,
                },
            .cache_keys = keys_.data(),
            .cache_values = values_.data(),
            .index_keys = index_keys_.data(),
            .slots = {data<int32_t>(state_sources), data<int32_t>(state_targets), slots_},
            .recent = recent_.data(),
            .states = states_.data(),
            .rotary = rotary_,
            .logits = data<float>(logits),
            .inputs = inputs ? data<float>(*inputs) : nullptr,
            .hidden = hidden_data_,
            .outputs = outputs ? data<float>(*outputs) : nullptr,
        };
        nb::gil_scoped_release release;
        decoder_.forward(step);
    }

    // (layers run, experts used, bytes, seconds)
    std::tuple<uint64_t, uint64_t, uint64_t, double> expert_totals() const {
        const ExpertTotals& now = decoder_.expert_totals();
        return {now.layers_run, now.experts_used, now.bytes, static_cast<double>(now.nanoseconds) * 1e-9};
    }
    const std::vector<std::vector<uint64_t>>& expert_uses() const { return decoder_.expert_uses(); }

    void record_choices(const Writable& choices) {
        require<uint16_t>(choices, "choices", {static_cast<int64_t>(decoder_.routed_layers()), kAny, kAny});
        decoder_.record_choices(data<uint16_t>(choices), choices.shape(1), choices.shape(2));
        choices_ = choices;
    }

  private:
    static StoredMatrix stored(const std::string& quant, size_t rows, size_t columns, const ReadOnly& packed) {
        const Quant kind = parse_quant(quant);
        require<uint8_t>(packed, "embedding", {static_cast<int64_t>(matrix_bytes(kind, rows, columns))});
        return {kind, rows, columns, data<uint8_t>(packed)};
    }

    ReadOnly embedding_, cosine_, sine_;
    std::vector<Writable> cache_, state_cache_;
    std::optional<Writable> choices_;
    std::optional<Writable> hidden_;
    float* hidden_data_ = nullptr;
    std::vector<float*> keys_, values_, index_keys_, recent_, states_;
    size_t pages_ = 0, page_size_ = 0, slots_ = 0;
    RotaryTables rotary_;
    Decoder decoder_;
};

}  // namespace

void bind_decoder(nb::module_& module) {
    nb::class_<BoundLinearAttention>(module, "LinearAttention")
        .def(nb::init<size_t, size_t, size_t, size_t, bool, const BoundLinear&, const BoundLinear&, const BoundLinear&,
                      const BoundLinear&, const ReadOnly&, const ReadOnly&, const ReadOnly&, const ReadOnly&>(),
             nb::kw_only(), nb::arg("key_heads"), nb::arg("value_heads"), nb::arg("key_dim"), nb::arg("value_dim"),
             nb::arg("tiled"), nb::arg("qkv"), nb::arg("gate"), nb::arg("decay"), nb::arg("rate"),
             nb::arg("convolution"), nb::arg("decay_rates"), nb::arg("decay_biases"), nb::arg("norm"),
             nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>());
    nb::class_<BoundIndexer>(module, "Indexer")
        .def(nb::init<size_t, size_t, const BoundLinear&, const BoundLinear&, const BoundLinear&, const ReadOnly&,
                      float>(),
             nb::kw_only(), nb::arg("heads"), nb::arg("columns"), nb::arg("query"), nb::arg("key"), nb::arg("weights"),
             nb::arg("norm"), nb::arg("epsilon"), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
             nb::keep_alive<1, 6>());
    nb::class_<BoundLatentAttention>(module, "LatentAttention")
        .def(nb::init<size_t, size_t, size_t, size_t, size_t, const BoundLinear*, const BoundLinear&,
                      const BoundLinear&, const BoundLinear&, const BoundLinear&, const ReadOnly&, const ReadOnly&,
                      float, float, float, size_t, const BoundIndexer*>(),
             nb::kw_only(), nb::arg("heads"), nb::arg("latent"), nb::arg("plain"), nb::arg("rotary"), nb::arg("value"),
             nb::arg("low_rank").none(), nb::arg("query"), nb::arg("key"), nb::arg("absorb"), nb::arg("expand"),
             nb::arg("low_rank_norm"), nb::arg("latent_norm"), nb::arg("epsilon"), nb::arg("growth"), nb::arg("period"),
             nb::arg("chosen"), nb::arg("indexer").none(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(),
             nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(), nb::keep_alive<1, 11>(), nb::keep_alive<1, 18>());
    nb::class_<BoundDecoder>(module, "Decoder")
        .def(nb::init<size_t, float, float, float, bool, float, float, const std::string&, const ReadOnly&,
                      const ReadOnly&, const BoundLinear&, float, const std::string&, float, bool>(),
             nb::kw_only(), nb::arg("hidden"), nb::arg("scaling"), nb::arg("epsilon"), nb::arg("embedding_scale"),
             nb::arg("norm_after_rotary"), nb::arg("score_cap"), nb::arg("logit_cap"), nb::arg("quant"),
             nb::arg("embedding"), nb::arg("norm"), nb::arg("head"), nb::arg("logit_scale"), nb::arg("isa"),
             nb::arg("value_scale") = 1.0f, nb::arg("softplus_gate") = false, nb::keep_alive<1, 12>())
        .def("add_layer", &BoundDecoder::add_layer, nb::kw_only(), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("attention_norm"), nb::arg("q").none(), nb::arg("k").none(),
             nb::arg("v").none(), nb::arg("o"), nb::arg("gate").none(), nb::arg("linear_attention").none(),
             nb::arg("latent_attention").none(), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("v_norm"),
             nb::arg("clip"), nb::arg("rotary_table"), nb::arg("rotary_pairs"), nb::arg("sliding_window"),
             nb::arg("chunk"), nb::arg("growth"), nb::arg("period"), nb::arg("sinks"), nb::arg("mlp_norm"),
             nb::arg("mlp").none(), nb::arg("shared_gate").none(), nb::arg("router").none(), nb::arg("experts").none(),
             nb::arg("experts_per_token"), nb::arg("renormalise"), nb::arg("sigmoid"), nb::arg("scale"),
             nb::arg("groups"), nb::arg("groups_used"), nb::arg("bias"), nb::arg("jitter"), nb::arg("scales"),
             nb::arg("router_norm"), nb::arg("experts_norm"), nb::arg("shared_out_norm"), nb::arg("experts_out_norm"),
             nb::arg("attention_out_norm"), nb::arg("mlp_out_norm"), nb::arg("out_scale"), nb::keep_alive<1, 6>(),
             nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(),
             nb::keep_alive<1, 11>(), nb::keep_alive<1, 12>(), nb::keep_alive<1, 25>(), nb::keep_alive<1, 26>(),
             nb::keep_alive<1, 27>(), nb::keep_alive<1, 28>())
        .def("set_rotary", &BoundDecoder::set_rotary, nb::arg("cosine"), nb::arg("sine"))
        .def("set_cache", &BoundDecoder::set_cache, nb::arg("keys"), nb::arg("values"), nb::arg("index_keys"))
        .def("set_states", &BoundDecoder::set_states, nb::arg("recent"), nb::arg("states"))
        .def("forward", &BoundDecoder::forward, nb::arg("input_ids"), nb::arg("position_ids"), nb::arg("scored"),
             nb::arg("query_starts"), nb::arg("context_lengths"), nb::arg("page_table"), nb::arg("slot_mapping"),
             nb::arg("state_sources"), nb::arg("state_targets"), nb::arg("logits"), nb::arg("inputs") = nb::none(),
             nb::arg("outputs") = nb::none())
        .def("set_hidden", &BoundDecoder::set_hidden, nb::arg("hidden"))
        .def("expert_totals", &BoundDecoder::expert_totals)
        .def("expert_uses", &BoundDecoder::expert_uses)
        .def("record_choices", &BoundDecoder::record_choices, nb::arg("choices"));
}

}  // namespace ktqueue
