#include "paged_attention.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "thread_pool.h"

namespace ktqueue {

namespace {

using std::to_string;

[[noreturn]] void refuse(const std::string& message) {
    throw std::invalid_argument(message);
}

void validate(const AttentionStep& step) {
    if (step.head_dim == 0 || step.head_dim % 8 != 0 || step.head_dim > kMaxHeadDim)
        refuse("head_dim must be a multiple of 8 and at most " + to_string(kMaxHeadDim) + ", got " +
               to_string(step.head_dim));
    if (step.kv_heads == 0 || step.heads == 0 || step.heads % step.kv_heads != 0)
        refuse("heads must be a positive multiple of kv_heads, got " + to_string(step.heads) + " and " +
               to_string(step.kv_heads));
    if (step.page_size == 0) refuse("page_size must be positive");
    if (step.query_starts[0] != 0 || step.query_starts[step.rows] != static_cast<int64_t>(step.tokens))
        refuse("query_starts must run from 0 to the number of tokens (" + to_string(step.tokens) + ")");
    for (size_t row = 0; row < step.rows; ++row) {
        const int64_t fed = static_cast<int64_t>(step.query_starts[row + 1]) - step.query_starts[row];
        const int64_t context = step.context_lengths[row];
        if (fed < 0) refuse("query_starts must not fall, row " + to_string(row));
        if (context < fed)
            refuse("context_lengths[" + to_string(row) + "] is " + to_string(context) + " but the row has " +
                   to_string(fed) + " tokens in this step");
        const size_t used = (static_cast<size_t>(context) + step.page_size - 1) / step.page_size;
        if (used > step.max_pages)
            refuse("context_lengths[" + to_string(row) + "] is " + to_string(context) + ", more than the row's " +
                   to_string(step.max_pages) + " pages hold");
        for (size_t i = 0; i < used; ++i) {
            const int32_t page = step.page_table[row * step.max_pages + i];
            if (page < 0 || static_cast<size_t>(page) >= step.pages)
                refuse("page_table[" + to_string(row) + "][" + to_string(i) + "] must be from 0 to " +
                       to_string(step.pages - 1) + ", got " + to_string(page));
        }
    }
    for (size_t t = 0; t < step.tokens; ++t)
        if (step.slot_mapping[t] < 0 || static_cast<size_t>(step.slot_mapping[t]) >= step.pages * step.page_size)
            refuse("slot_mapping[" + to_string(t) + "] must be from 0 to " +
                   to_string(step.pages * step.page_size - 1) + ", got " + to_string(step.slot_mapping[t]));
}

void write_cache(const AttentionStep& step) {
    for (size_t t = 0; t < step.tokens; ++t)
        for (size_t head = 0; head < step.kv_heads; ++head) {
            const size_t at = (static_cast<size_t>(step.slot_mapping[t]) * step.kv_heads + head) * step.head_dim;
            std::copy_n(step.key + head * step.key_head_stride + t * step.key_token_stride, step.head_dim,
                        step.cache_keys + at);
            std::copy_n(step.value + head * step.value_head_stride + t * step.value_token_stride, step.head_dim,
                        step.cache_values + at);
        }
}

// Tokens `first`..`last`-1 (of the packed batch), all of one row, at query heads head .. head + heads - 1, which share
// a key/value head.
struct Piece {
    size_t row, first, last, head, heads;
};

void attend(const AttentionStep& step, const Piece& piece, const KernelTable& kernels) {
    const float* query[kMaxVectors];
    float* output[kMaxVectors];
    size_t first_key[kMaxVectors], last_key[kMaxVectors];
    size_t vectors = 0;
    const size_t end = static_cast<size_t>(step.query_starts[piece.row + 1]);
    for (size_t t = piece.first; t < piece.last; ++t)
        for (size_t head = piece.head; head < piece.head + piece.heads; ++head, ++vectors) {
            query[vectors] = step.query + head * step.query_head_stride + t * step.query_token_stride;
            output[vectors] = step.output + (t * step.heads + head) * step.head_dim;
            const size_t seen = static_cast<size_t>(step.context_lengths[piece.row]) - (end - 1 - t);
            last_key[vectors] = seen;
            first_key[vectors] = step.sliding_window && seen > step.sliding_window ? seen - step.sliding_window : 0;
        }
    const size_t kv_offset = piece.head / (step.heads / step.kv_heads) * step.head_dim;
    kernels.attention({query, output, first_key, last_key, vectors, step.cache_keys + kv_offset,
                       step.cache_values + kv_offset, step.page_table + piece.row * step.max_pages, step.page_size,
                       step.kv_heads * step.head_dim, step.head_dim, step.scaling});
}

// Cuts the step into pieces of at most kMaxVectors query vectors, longest contexts first: they make the last tasks
// short.
void cut(const AttentionStep& step, std::vector<Piece>& pieces) {
    const size_t group = step.heads / step.kv_heads;
    const size_t heads_at_once = std::min(group, kMaxVectors);
    const size_t tokens_at_once = kMaxVectors / heads_at_once;
    pieces.clear();
    for (size_t row = 0; row < step.rows; ++row) {
        const size_t begin = static_cast<size_t>(step.query_starts[row]);
        for (size_t last = static_cast<size_t>(step.query_starts[row + 1]); last > begin;) {
            const size_t first = last - begin > tokens_at_once ? last - tokens_at_once : begin;
            for (size_t shared = 0; shared < step.heads; shared += group)
                for (size_t head = shared; head < shared + group; head += heads_at_once)
                    pieces.push_back({row, first, last, head, std::min(heads_at_once, shared + group - head)});
            last = first;
        }
    }
}

}  // namespace

void paged_attention(const AttentionStep& step, const KernelTable& kernels) {
    validate(step);
    static std::mutex mutex;
    static std::vector<Piece>& pieces = *new std::vector<Piece>;  // grows only, never destroyed
    std::lock_guard lock(mutex);
    write_cache(step);
    cut(step, pieces);
    shared_pool()->for_each(pieces.size(), [&](size_t task) { attend(step, pieces[task], kernels); });
}

}  // namespace ktqueue
