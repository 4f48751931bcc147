// A decoder-only transformer as one call: token ids to logits, through embedding, decoder layers, final norm and head.
// Knows no model family (a layer is described by its parts) and no Python.
//
// A layer computes x += o(attention(rope(norm(q)), rope(norm(k)), v)) of norm(x), then x += feed_forward(norm(x)). What
// is added may have a norm of its own. Latent or linear attention may take the place of attention. Rows are
// independent: a token with non-finite numbers spoils only its own sequence. Results do not depend on the batch, except
// as the matrices say (model/linear.h, experts/expert_layer.h).
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "model/feed_forward.h"
#include "model/latent_attention.h"
#include "model/linear.h"
#include "model/linear_attention.h"
#include "model/paged_attention.h"
#include "model/rotary.h"

namespace ktqueue {

// Matrices belong to the caller and must outlive the decoder.
struct DecoderLayer {
    std::vector<float> attention_norm;  // of the input of attention: see Decoder
    AttentionShape attention = {};      // not of linear attention
    const Linear *q = nullptr, *k = nullptr;
    const Linear* o = nullptr;                        // if values end with zeros, it has fewer columns of each head
    const Linear* v = nullptr;                        // null: a value is its key before norm and rotation
    const Linear* gate = nullptr;                     // of the output of attention: of each number, as q, or each head
    std::optional<LinearAttention> linear_attention;  // then q, k, v and the fields down to the sinks are unused
    std::optional<LatentAttention> latent_attention;  // then q, k, v, gate, their norms and clip are unused
    std::vector<float> q_norm, k_norm;                // empty, [head_dim] for each head, or of the whole projection
    std::vector<float> v_norm;                        // empty, or [head_dim] for each head
    float clip = 0;                // q, k and v are clamped to -clip .. clip after their norms; 0: not clamped
    size_t rotary_table = 0;       // which of the step's rotary tables
    size_t rotary_pairs = 0;       // pairs of columns of each head of q and k that are rotated, from the table's first
    size_t sliding_window = 0;     // as in AttentionLayer
    size_t chunk = 0;              // as in AttentionLayer
    float growth = 0, period = 1;  // q at position p is multiplied by growth_factor(growth, period, p + 1)
    std::vector<float> sinks;      // [heads] as in AttentionLayer, or empty
    std::vector<float> attention_out_norm;  // of what attention adds to x, or empty
    FeedForwardLayer feed_forward;
};

struct DecoderShape {
    size_t hidden;
    float scaling;                               // of attention scores
    float epsilon;                               // of all norms
    float embedding_scale = 1, logit_scale = 1;  // factors of the embedding and of the logits
    bool norm_after_rotary = false;              // the norms of q and k follow their rotation
    float score_cap = 0;                         // as in AttentionLayer
    float logit_cap = 0;                         // a logit x becomes cap * tanh(x / cap); 0: it does not
    float value_scale = 1;                       // of values, in layers of plain attention
    bool softplus_gate = false;                  // the output of attention is multiplied by softplus(gate), not sigmoid
};

// One step. `scored`: indices in the packed batch, rising, of the tokens whose logits are wanted.
struct DecoderStep {
    const int64_t* ids;        // [paged.tokens]
    const int64_t* positions;  // [paged.tokens]
    const int64_t* scored;
    size_t scored_count;
    PagedStep paged;
    float* const* cache_keys;    // per layer with attention: [pages, page_size, kv_heads, head_dim]
    float* const* cache_values;  // with latent attention the keys
    float* const* index_keys;    // the same, of layers with an indexer [pages, page_size, columns]
    StateStep slots;             // of a model with linear attention
    float* const* recent;        // per layer with linear attention: see LinearAttentionCall
    float* const* states;
    RotaryTables rotary;
    float* logits;                  // [scored_count, vocabulary]
    const float* inputs = nullptr;  // [paged.tokens, hidden] in place of embeddings; null: `ids` are embedded
    float* hidden = nullptr;   // [pages, page_size, hidden]: each token's input of the head, at its slot; null: none
    float* outputs = nullptr;  // [scored_count, hidden]: the scored tokens before the last norm; null: none
};

class Decoder {
  public:
    // `embedding`: [vocabulary, hidden], used in place. `head`: [vocabulary, hidden]. Both must outlive the decoder.
    // `norm`, as those of the layers: [hidden], an RMSNorm; or [2, hidden], weights and biases of a LayerNorm.
    // Throws std::invalid_argument if shapes disagree.
    Decoder(const DecoderShape& shape, const StoredMatrix& embedding, std::vector<float> norm, const Linear& head,
            const KernelTable& kernels);

    // Throws std::invalid_argument if the layer's parts do not fit each other or the decoder.
    void add_layer(DecoderLayer layer);

    // Runs one step. A second caller waits. Throws std::invalid_argument, before anything is written, if an index of
    // the step is out of range.
    void forward(const DecoderStep& step);

    const DecoderShape& shape() const { return shape_; }
    // The shapes of the layers with keys and values, in order.
    const std::vector<AttentionShape>& attention_layers() const { return attention_layers_; }
    // The shapes of the layers with linear attention, in order.
    const std::vector<LinearAttentionShape>& linear_layers() const { return linear_layers_; }
    // Columns of the keys of the indexers; 0: there are none.
    size_t index_columns() const { return index_columns_; }
    size_t vocabulary() const { return head_.rows(); }

    const ExpertTotals& expert_totals() const { return feed_forward_.totals(); }

    // How often each routed expert of each layer was used since the start; empty for layers without. No step may run.
    const std::vector<std::vector<uint64_t>>& expert_uses() const { return expert_uses_; }

    // From now on each step writes the experts of its tokens to choices[routed layers, tokens, chosen], highest weight
    // first. In the last layer these are the scored tokens. A step may have at most so many tokens. The memory belongs to
    // the caller. Throws std::invalid_argument if a layer chooses another number of experts. No step may run.
    void record_choices(uint16_t* choices, size_t tokens, size_t chosen);
    // How many layers have routed experts.
    size_t routed_layers() const;

  private:
    struct Workspace {
        std::vector<float> x, normed, low_rank, projected, q, k, v, gate, decay, rate, attended, out, index_keys,
            index_queries, index_weights, index_scores;
        std::vector<int64_t> positions;
        std::vector<int32_t> choice;  // [tokens, chosen] slots: see ChoiceCall
    };

    // The attention of a step in the layers with these heads.
    struct PlannedShape {
        AttentionShape shape;
        AttentionPlan all, scored;
    };

    void check(const DecoderStep& step) const;
    AttentionPlan& plan_of(const AttentionShape& shape, bool scored_only);
    void embed(const DecoderStep& step);
    void project(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only);
    void project_latent(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only);
    void keep_scored(const DecoderStep& step);
    void attend_layer(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only);
    void attend_linearly(const DecoderLayer& layer, const DecoderStep& step, size_t index, bool scored_only);
    void multiply_by_gate(const DecoderLayer& layer, float* attended, size_t count);
    const float* shorter_values(const DecoderLayer& layer, const float* attended, size_t count);
    void add_attended(const DecoderLayer& layer, const float* attended, size_t width, size_t count);
    void keep_hidden(const DecoderStep& step);
    void normalise(const std::vector<float>& norm, size_t count);

    const DecoderShape shape_;
    const StoredMatrix embedding_;
    const std::vector<float> norm_;
    const Linear& head_;
    const KernelTable& kernels_;
    std::vector<DecoderLayer> layers_;
    std::vector<AttentionShape> attention_layers_;
    std::vector<LinearAttentionShape> linear_layers_;
    std::vector<PlannedShape> plans_;
    size_t chosen_ = 0, index_columns_ = 0;  // of all layers: see LatentAttention
    std::mutex mutex_;
    Workspace work_;
    FeedForward feed_forward_;
    std::vector<std::vector<uint64_t>> expert_uses_;  // by layer
    uint16_t* choices_ = nullptr;                     // see record_choices
    size_t choice_tokens_ = 0;
};

}  // namespace ktqueue
