// The widest vector on instruction sets whose vectors have at most eight floats.
// Included only by translation units of one instruction set, after a vector header; internal linkage.
#pragma once

#include <cstddef>

namespace ktqueue {
namespace {

using Wide = Vector8;
constexpr size_t kWide = 8;

inline Wide load_wide(const float* source) {
    return load(source);
}

inline Wide splat_wide(float value) {
    return splat(value);
}

}  // namespace
}  // namespace ktqueue
