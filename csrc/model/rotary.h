// Rotary position embedding in transformers' order: elements i and i + half are rotated together, by the angle of the
// token's position.
#pragma once

#include <cstddef>

namespace ktqueue {

// Cosines and sines of every position from the model's own rotary module, including its scaling. Layers may use
// different tables.
struct RotaryTables {
    const float* cosine = nullptr;  // [count, positions, half]
    const float* sine = nullptr;    // [count, positions, half]
    size_t count = 0, positions = 0, half = 0;
};

// Rotates the first 2 * half elements of `head` in place; the others keep their values.
inline void rotate(float* head, const float* cosine, const float* sine, size_t half) {
    for (size_t i = 0; i < half; ++i) {
        const float low = head[i], high = head[i + half];
        head[i] = low * cosine[i] - high * sine[i];
        head[i + half] = high * cosine[i] + low * sine[i];
    }
}

}  // namespace ktqueue
