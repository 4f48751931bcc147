// Rotary position embedding in transformers' order: element i turns with element i + half, by the angle of its position.
#pragma once

#include <cstddef>

namespace ktqueue {

// Cosines and sines of every position, as the model's own rotary module gives them, its scaling included.
struct RotaryTable {
    const float* cosine = nullptr;  // [positions, half]
    const float* sine = nullptr;    // [positions, half]
    size_t positions = 0, half = 0;
};

// Turns the first 2 * half elements of `head` in place; the rest stays.
inline void rotate(float* head, const float* cosine, const float* sine, size_t half) {
    for (size_t i = 0; i < half; ++i) {
        const float low = head[i], high = head[i + half];
        head[i] = low * cosine[i] - high * sine[i];
        head[i + half] = high * cosine[i] + low * sine[i];
    }
}

}  // namespace ktqueue
