// Applies grammars' masks to logits. Knows no grammar.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktqueue {

// Sets the logits of tokens that are not allowed to -infinity: those whose bit in masks[words] is 0. Token t has bit
// t % 32 of word t / 32. Bits from `vocab` on are ignored. words = ceil(vocab / 32).
void mask_logits(float* logits, size_t vocab, const uint32_t* masks);

}  // namespace ktqueue
