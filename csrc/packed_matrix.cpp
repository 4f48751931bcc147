#include "packed_matrix.h"

#include <sys/mman.h>

#include <new>
#include <stdexcept>
#include <string>

namespace ktqueue {

namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kMostWeights = size_t{1} << 48;

}  // namespace

Arena::Arena(size_t bytes) : bytes_(bytes) {
    // Small ones get no pages of their own: a model has many little matrices.
    mapped_ = bytes >= kHugePage ? round_up(bytes, kHugePage) + kHugePage : round_up(bytes + 64, 4096);
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<uint8_t*>(memory);
    data_ = base_;
    if (bytes >= kHugePage) {
        data_ += (kHugePage - reinterpret_cast<uintptr_t>(base_) % kHugePage) % kHugePage;
        // 4 KB pages cost 13 to 32 % of the read bandwidth. A system without large ones says no, and all still works.
        (void)madvise(data_, round_up(bytes, kHugePage), MADV_HUGEPAGE);
    }
}

Arena::~Arena() {
    if (base_) munmap(base_, mapped_);
}

Arena::Arena(Arena&& other) noexcept
    : bytes_(other.bytes_), mapped_(other.mapped_), base_(other.base_), data_(other.data_) {
    other.base_ = nullptr;
}

size_t matrix_bytes(Quant quant, size_t rows, size_t columns) {
    const size_t bytes = row_bytes(quant, columns);
    if (columns > kMostWeights || rows > kMostWeights / columns)
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(columns) +
                                    " weights is too large");
    return rows * bytes;
}

}  // namespace ktqueue
