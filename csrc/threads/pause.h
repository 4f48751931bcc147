// What a spinning thread does between two reads of a word that another thread will change.
#pragma once

namespace ktqueue {

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace ktqueue
