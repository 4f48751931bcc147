// Small operations on rows of floats, and the checks that the parts of a decoder share.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "model/linear.h"

namespace ktqueue {

inline void require(bool fits, const char* what) {
    if (!fits) throw std::invalid_argument(std::string(what) + " does not fit the decoder");
}

inline bool fits(const Linear* linear, size_t rows, size_t columns) {
    return linear && linear->rows() == rows && linear->columns() == columns;
}

// The first `count` elements of a workspace, which only grows.
template <class T>
T* grown(std::vector<T>& buffer, size_t count) {
    if (buffer.size() < count) buffer.resize(count);
    return buffer.data();
}

inline void add(float* x, const float* y, size_t count) {
    for (size_t i = 0; i < count; ++i) x[i] += y[i];
}

inline void scale(float* values, size_t count, float factor) {
    if (factor == 1) return;
    for (size_t i = 0; i < count; ++i) values[i] *= factor;
}

}  // namespace ktqueue
