// Queries that grow with their position, so that scores of long contexts do not flatten (Llama 4, Mistral 4).
#pragma once

#include <cmath>
#include <cstdint>

namespace ktqueue {

// 1 + growth * log(1 + floor(place / period)), as transformers' modeling_llama4.py and modeling_mistral4.py have it.
inline float growth_factor(float growth, float period, int64_t place) {
    return 1.0f + growth * std::log1p(std::floor(static_cast<float>(place) / period));
}

}  // namespace ktqueue
