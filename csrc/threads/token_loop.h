// A loop over tokens of cheap work: on the calling thread if it is little, else by the shared pool.
#pragma once

#include <algorithm>
#include <cstddef>

#include "threads/thread_pool.h"

namespace ktqueue {

// Runs body(0 .. tokens - 1) in any order. `work`: roughly how many numbers the body goes through.
template <class Body>
void for_tokens(size_t tokens, size_t work, Body&& body) {
    constexpr size_t kTask = 32 * 1024;  // numbers: some microseconds, several times what handing a task out costs
    const size_t step = std::max<size_t>(1, kTask / std::max<size_t>(1, work));
    if (tokens <= step) {
        for (size_t t = 0; t < tokens; ++t) body(t);
        return;
    }
    shared_pool()->for_each((tokens + step - 1) / step, [&](size_t task) {
        for (size_t t = task * step; t < std::min(tokens, (task + 1) * step); ++t) body(t);
    });
}

}  // namespace ktqueue
