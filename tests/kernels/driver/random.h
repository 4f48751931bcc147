// Random numbers, and arrays of them between guard pages, for kernel_driver's cases.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace ktqueue {

inline void require(bool holds, const std::string& what) {
    if (!holds) throw std::runtime_error(what);
}

class Random {
  public:
    explicit Random(uint64_t seed) : bits_(seed) {}

    // low .. high, inclusive.
    size_t number(size_t low, size_t high) { return low + bits_() % (high - low + 1); }
    bool chance(size_t one_in) { return number(1, one_in) == 1; }

    template <class Container>
    auto& element(Container& of) {
        return of[number(0, std::size(of) - 1)];
    }

    float normal() { return normal_(bits_); }

    // Most numbers are near 0. Sometimes all are huge or tiny, or one is huge, subnormal, infinite or NaN.
    std::vector<float> floats(size_t count) {
        std::vector<float> values(count);
        const float sizes[] = {1e-44f, 1e-38f, 1e-20f, 1e10f, 1e25f, 3e37f};
        const float size = chance(8) ? element(sizes) : 1.0f;
        for (float& value : values) value = size * normal();
        const float strange[] = {INFINITY, -INFINITY, NAN, 3e38f, -3e38f, 1e-42f, -0.0f};
        if (count > 0 && chance(4)) element(values) = element(strange);
        return values;
    }

    int64_t any_integer() {
        const int64_t strange[] = {-1, 0, 1, 1 << 20, INT32_MAX, INT32_MIN, static_cast<int64_t>(number(0, 100))};
        return element(strange);
    }

  private:
    std::mt19937_64 bits_;
    std::normal_distribution<float> normal_;
};

// `count` elements that end where a page without access rights begins or, at random, begin where one ends. So even code
// that no sanitizer sees, such as a masked load, cannot read beyond them unnoticed. Bytes may thus have any address.
template <class T>
class Guarded {
  public:
    Guarded(Random& random, size_t count) : count_(count) {
        const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t inner = (count * sizeof(T) + page - 1) / page * page;
        mapped_ = inner + 2 * page;
        void* memory = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        base_ = static_cast<uint8_t*>(memory);
        if (inner > 0) require(mprotect(base_ + page, inner, PROT_READ | PROT_WRITE) == 0, "no guard pages");
        const size_t slack = random.chance(3) ? 0 : inner - count * sizeof(T);
        data_ = reinterpret_cast<T*>(base_ + page + slack);
    }
    Guarded(Random& random, const std::vector<T>& values) : Guarded(random, values.size()) {
        if (count_ > 0) std::memcpy(data_, values.data(), count_ * sizeof(T));
    }
    Guarded(Guarded&& other) noexcept
        : count_(other.count_), mapped_(other.mapped_), base_(other.base_), data_(other.data_) {
        other.base_ = nullptr;
    }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;
    ~Guarded() {
        if (base_) munmap(base_, mapped_);
    }

    T* data() const { return data_; }
    size_t size() const { return count_; }
    T& operator[](size_t i) const { return data_[i]; }
    T* begin() const { return data_; }
    T* end() const { return data_ + count_; }

  private:
    size_t count_, mapped_;
    uint8_t* base_;
    T* data_;
};

// The content of outputs before a call: a NaN that no kernel produces.
inline constexpr uint32_t kUntouched = 0x7fc12345;

inline bool untouched(const float& value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits == kUntouched;
}

inline Guarded<float> untouched_floats(Random& random, size_t count) {
    Guarded<float> values(random, count);
    for (float& value : values) std::memcpy(&value, &kUntouched, 4);
    return values;
}

}  // namespace ktqueue
