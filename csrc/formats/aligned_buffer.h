// A buffer that starts on a cache line and only grows. No full-width load of an aligned row crosses a line.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace ktqueue {

inline constexpr size_t kCacheLine = 64;  // bytes

template <class T>
struct CacheLineAllocator {
    using value_type = T;
    T* allocate(size_t count) {
        return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(kCacheLine)));
    }
    void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t(kCacheLine)); }
    bool operator==(const CacheLineAllocator&) const = default;
};

template <class T>
class AlignedBuffer : public std::vector<T, CacheLineAllocator<T>> {
  public:
    void grow(size_t size) {
        if (this->size() < size) this->resize(size);
    }
};

}  // namespace ktqueue
