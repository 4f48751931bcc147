// Checks arrays from Python: a wrong type or shape is a ValueError. Used by all bindings.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace ktqueue {

namespace nb = nanobind;

using ReadOnly = nb::ndarray<nb::ro, nb::device::cpu>;
using Writable = nb::ndarray<nb::device::cpu>;

inline constexpr int64_t kAny = -1;

inline std::string shape_text(const auto& shape) {
    std::string text = "[";
    for (int64_t extent : shape)
        text += (text.size() > 1 ? ", " : "") + (extent == kAny ? "any" : std::to_string(extent));
    return text + "]";
}

// Checks the element type and the shape; with `dense` also C order. kAny accepts any extent.
template <class T>
void require(const auto& array, const char* name, std::initializer_list<int64_t> shape, bool dense = true) {
    bool fits = array.ndim() == shape.size();
    std::string got = "[";
    for (size_t i = 0; i < array.ndim(); ++i) {
        got += (i ? ", " : "") + std::to_string(array.shape(i));
        fits = fits && (shape.begin()[i] == kAny || shape.begin()[i] == static_cast<int64_t>(array.shape(i)));
    }
    if (!fits)
        throw std::invalid_argument(std::string(name) + " must have shape " + shape_text(shape) + ", got " + got + "]");
    if (array.dtype() != nb::dtype<T>()) throw std::invalid_argument(std::string(name) + " has the wrong element type");
    if (array.size() == 0) return;  // without elements, strides do not matter
    int64_t expected = 1;
    for (size_t i = array.ndim(); i-- > 0;) {
        const bool last = i + 1 == array.ndim();
        if ((dense || last) && array.shape(i) > 1 && array.stride(i) != expected)
            throw std::invalid_argument(std::string(name) +
                                        (dense ? " must be contiguous" : " must have a dense last dimension"));
        expected *= static_cast<int64_t>(array.shape(i));
    }
}

template <class T>
const T* data(const ReadOnly& array) {
    return static_cast<const T*>(array.data());
}

template <class T>
T* data(const Writable& array) {
    return static_cast<T*>(array.data());
}

inline size_t stride(const ReadOnly& array, size_t dimension) {
    if (array.stride(dimension) < 0) throw std::invalid_argument("strides must not be negative");
    return static_cast<size_t>(array.stride(dimension));
}

}  // namespace ktqueue
