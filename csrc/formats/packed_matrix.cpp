#include "formats/packed_matrix.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

namespace ktqueue {

namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kMostWeights = size_t{1} << 48;

}  // namespace

// Uses large pages for what fills them, and for the rest if it nearly fills one more: 2.1 MB must not take 4.
Arena::Arena(size_t bytes) : bytes_(bytes), mapped_(round_up(bytes + 64, 4096)) {
    const size_t filled = bytes / kHugePage * kHugePage, next = round_up(bytes, kHugePage);
    const size_t huge = next - bytes <= bytes / 16 ? next : filled;
    mapped_ = std::max(mapped_, huge);
    const size_t slack = huge > 0 ? kHugePage : 0;  // room to find an aligned address
    void* memory = mmap(nullptr, mapped_ + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(memory);
    if (huge == 0) return;
    const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(data_) % kHugePage) % kHugePage;
    if (before > 0) munmap(data_, before);
    data_ += before;
    if (slack > before) munmap(data_ + mapped_, slack - before);
    // 4 KB pages cost 13 to 32 % of the read bandwidth. On a system without large pages the call fails, which is
    // harmless.
    (void)madvise(data_, huge, MADV_HUGEPAGE);
}

Arena::~Arena() {
    if (data_) munmap(data_, mapped_);
}

size_t matrix_bytes(Quant quant, size_t rows, size_t columns) {
    const size_t bytes = row_bytes(quant, columns);
    if (columns > kMostWeights || rows > kMostWeights / columns)
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(columns) +
                                    " weights is too large");
    return rows * bytes;
}

Arena::Arena(Arena&& other) noexcept : bytes_(other.bytes_), mapped_(other.mapped_), data_(other.data_) {
    other.data_ = nullptr;
}

}  // namespace ktqueue
